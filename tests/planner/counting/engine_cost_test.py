"""The modeled cost of an inference engine outside JAX."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs import work as work_lib
from planner.costs.decoding import decode
from planner.counting import count
from planner.ir import plan as plan_lib
from sharding import mesh as mesh_lib
from sharding import rules
import stages
from stages import base, kernels, workflows
from stages.language import language_model, partial_rollout
from stages.language.decoding import kv_cache
from stages.language.decoding.slots import slot_cache
from stages.models import transformer
import tiny

LENGTH, CACHE, GROUP = 24, 1e9, 4
# Memory traffic decides: no time to launch, and no gaps.
DEVICE = cluster_lib.Device('toy', {'float32': 1e15}, 1e15, 8e9, 1e9, 1e12)
LINK = cluster_lib.Link(0.0, 1e12)


def shapes(params, prompt, key_B):
  del params
  rows = key_B.shape[0], LENGTH
  real = jax.ShapeDtypeStruct(rows, jnp.float32)
  return base.Experience(
    prompt,
    jax.ShapeDtypeStruct(rows, jnp.int32),
    real,
    real,
    jax.ShapeDtypeStruct(rows[:1], jnp.float32),
  )


@functools.cache
def policy_of(slots=None):
  """A policy whose functions are traced once for all that is modeled."""
  return tiny.policy(length=LENGTH, slots=slots)


def generating(flow):
  """Works of stages, of which only generating is counted, in half the time."""
  others = {*flow.stages} - {'generate'}
  none = work_lib.StageWork(work_lib.NONE)
  return dict.fromkeys(others, none) | count.of_flow(flow, known=others)


@functools.cache
def model(max_rows=64, engine=True, devices=2, groups=8, ranks=None):
  """The flow of GRPO whose prompts an engine completes, and its costs."""
  policy = policy_of()
  cost = stages.EngineCost(
    policy.act, CACHE, lambda *shapes: 1e6, max_rows, ranks
  )
  policy = policy._replace(
    act=None, out_shapes=shapes, engine=cost if engine else None
  )
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=GROUP)
  flow = tiny.trace(workflow, tiny.problem(groups))
  there = cluster_lib.Cluster(DEVICE, devices, devices, LINK, LINK)
  return flow, roofline.Roofline(flow, generating(flow), there, rules.DEFAULT)


def parameter_bytes():
  params = jax.eval_shape(policy_of().init, jax.random.key(0))
  return sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def generate(flow):
  return next(node for node in flow.nodes if node.name == 'generate')


def seconds(flow, costs, placement=plan_lib.Placement(), rows=None):
  return costs.seconds(flow, generate(flow), placement, rows)


def parts(flow, costs, **axes):
  """Components of the seconds of generating on a mesh of two devices or one."""
  placement = plan_lib.Placement()
  if axes:
    placement = plan_lib.Placement((0, 1), tuple(axes.items()))
  return costs.explain(flow, generate(flow), placement)


def test_an_engine_takes_a_step_for_each_token_of_its_longest_row():
  flow, costs = model()
  call = costs.works['generate']
  assert decode.max_tokens(call) == LENGTH
  whole = seconds(flow, costs)
  # A host stage of the same rows is modeled by its rows alone.
  assert whole != pytest.approx(seconds(*model(engine=False)))
  shorter = decode.with_lengths(call, 32 * [LENGTH // 4])
  works = costs.works | {'generate': shorter}
  quarter = roofline.Roofline(flow, works, costs.cluster, rules.DEFAULT)
  assert 0.2 < seconds(flow, quarter) / whole < 0.3


def test_rows_beyond_the_most_at_once_wait():
  at_once, in_turns = (seconds(*model(max_rows=rows)) for rows in (32, 8))
  assert 1.2 * at_once < in_turns  # Each turn reads the parameters.


def test_ranks_share_the_model_and_copies_share_the_rows():
  flow, costs = model()
  one = parts(flow, costs)['steps until rows end'].value
  divided = parts(flow, costs, tensor=2)['steps until rows end'].value
  assert divided == pytest.approx(one / 2, rel=0.02)
  half = parts(*model(groups=4))['steps until rows end'].value
  for axis in ('data', 'fsdp'):
    copied = parts(flow, costs, **{axis: 2})['steps until rows end'].value
    assert copied == pytest.approx(half, rel=0.02)


def test_new_parameters_reach_ranks_through_the_memory_of_the_host():
  flow, costs = model()
  size, sent = parameter_bytes(), 'parameters, launch'
  here = parts(flow, costs)[sent].value
  assert here == pytest.approx(2 * size / DEVICE.memory_bandwidth, rel=0.01)
  ranks = parts(flow, costs, tensor=2)[sent].value
  assert ranks == pytest.approx(1.5 * size / DEVICE.host_bandwidth, rel=0.01)


def test_ranks_add_up_twice_a_layer_and_once_for_the_embedding():
  flow, costs = model()
  slow = cluster_lib.Link(1.0, 1e30)  # A second a message, however long.
  there = cluster_lib.Cluster(DEVICE, 2, 2, slow, slow)
  slow = roofline.Roofline(flow, costs.works, there, rules.DEFAULT)
  step = 'steps until rows end'
  spent = parts(flow, slow, tensor=2)[step].value
  spent -= parts(flow, costs, tensor=2)[step].value
  layers, passes = 2, LENGTH + 1  # The prompt is a pass of its own.
  assert spent == pytest.approx((2 * layers + 1) * passes, rel=1e-3)


def test_ranks_hold_a_part_of_the_model_and_a_cache_each():
  flow, costs = model()
  call = costs.works['generate']
  found = call.bytes(
    flow, generate(flow), (('tensor', 2),), costs.layout, 1, None
  )
  assert found['keys and values of the engine'].value == CACHE
  assert found["the engine's copy of parameters"].value == pytest.approx(
    parameter_bytes() / 2, rel=0.01
  )
  # Without a number, it reserves what all its rows need.
  enough = dataclasses.replace(call, kept=3e6, budget=math.inf, max_rows=7)
  for axes, want in (((), 21e6), ((('tensor', 2),), 21e6 / 2)):
    found = enough.bytes(flow, generate(flow), axes, costs.layout, 1, None)
    assert found['keys and values of the engine'].value == want
    assert enough.slots(1000, 1) == 7
  # Heads of keys that are fewer than the ranks are copied.
  few = dataclasses.replace(call, kept=CACHE / 8, cache_shards=2)
  assert [few.slots(1000, ways) for ways in (1, 2, 4)] == [8, 16, 16]


def test_places_divide_the_model_of_an_engine_as_it_can():
  for allowed, want in ((None, {1, 2}), ((1, 4), {1}), ((1, 2), {1, 2})):
    flow, costs = model(devices=4, ranks=allowed)
    found = costs.axes(('generate',), 4)
    assert {dict(axes).get('tensor', 1) for axes in found} == want
  nodes = cluster_lib.Cluster(DEVICE, 4, 2, LINK, LINK)
  several = roofline.Roofline(flow, costs.works, nodes, rules.DEFAULT)
  assert several.axes(('generate',), 2)
  assert not several.axes(('generate',), 4)  # Of two processes.


def test_an_engine_needs_its_cache_and_its_own_parameters():
  flow, costs = model()
  works = count.of_flow(flow)
  costs = roofline.Roofline(flow, works, costs.cluster, rules.DEFAULT)
  plan = plan_lib.one_place(flow.stages, plan_lib.Placement())
  parts = costs.explain_memory(flow, plan, 'all')
  found = {name.split(',')[0]: number.value for name, number in parts.items()}
  assert found['keys and values of the engine'] == CACHE
  assert found["the engine's copy of parameters"] == pytest.approx(
    parameter_bytes(), rel=0.01
  )


@functools.cache
def slotted(slots):
  """Seconds and memory of our own loop with slots, of 32 rows."""
  workflow = workflows.grpo(
    policy_of(slots),
    tiny.even,
    optax.sgd(0.1),
    group_size=GROUP,
  )
  flow = tiny.trace(workflow, tiny.problem())
  there = cluster_lib.Cluster(DEVICE, 2, 2, LINK, LINK)
  costs = roofline.Roofline(flow, generating(flow), there, rules.DEFAULT)
  return flow, costs


def with_lengths(flow, costs, lengths):
  call = decode.with_lengths(costs.works['generate'], lengths)
  works = costs.works | {'generate': call}
  return roofline.Roofline(flow, works, costs.cluster, rules.DEFAULT)


def test_slots_of_our_own_loop_are_priced_as_rows_enter_them():
  rows = 32
  flow, static = slotted(None)
  long_tail = 24 * [2] + 4 * [LENGTH // 3] + 4 * [LENGTH]
  _, few = slotted(4)
  # Of equal rows, four at a time take eight times the steps of them all.
  equal = seconds(flow, few)
  turns = seconds(flow, few, rows=4)
  assert equal == pytest.approx(turns, rel=1e-3)
  # Of rows with a long tail, slots take fewer steps than micro-batches.
  tail = seconds(flow, with_lengths(flow, few, long_tail))
  batches = seconds(flow, with_lengths(flow, static, long_tail), rows=4)
  assert 0.3 * batches < tail < 0.7 * batches
  # More slots than rows stay empty, and are not computed.
  whole = seconds(*slotted(rows))
  assert whole == seconds(*slotted(2 * rows)) < equal


def test_slots_need_memory_for_their_own_rows_alone():
  def live(slots):
    flow, costs = slotted(slots)
    call = costs.works['generate']
    if slots is None:
      call = decode.with_lengths(call, [LENGTH])
    parts = call.bytes(flow, generate(flow), (), costs.layout, 1, None)
    return parts['activations'].value

  assert live(4) < live(16) < live(None) == live(64)


@functools.cache
def continued(slots, extra_groups=2):
  """Work of partial rollouts, which carry two groups of four beside eight."""
  workflow = workflows.grpo(
    policy_of(slots),
    tiny.even,
    optax.sgd(0.1),
    group_size=GROUP,
    rollouts=functools.partial(
      partial_rollout.partial_rollouts, max_carry=1, extra_groups=extra_groups
    ),
  )
  flow = tiny.trace(workflow, tiny.problem())
  there = cluster_lib.Cluster(DEVICE, 2, 2, LINK, LINK)
  return flow, roofline.Roofline(flow, generating(flow), there, rules.DEFAULT)


def test_slots_of_partial_rollouts_need_memory_for_their_own_rows_alone():
  def live(slots, *axes):
    flow, costs = continued(slots)
    call, node = costs.works['generate'], generate(flow)
    return call.bytes(flow, node, axes, costs.layout, 1, None)['activations']

  # The eight carried rows have slots together, four on each of two devices.
  assert live(1) == live(8)
  assert live(1, ('data', 2)).value < live(8).value < live(40).value
  static = continued(None)[1].works['generate'].full_batch.bytes_alive
  # In one array of all columns, of as many rows and as many slots.
  assert live(40).value == pytest.approx(static, rel=0.05)


def test_slots_of_partial_rollouts_take_a_step_for_each_token_of_their_rows():
  few, all_ = (seconds(*continued(slots)) for slots in (8, 40))
  # Forty rows in eight slots take five turns, of a fifth of the rows each.
  assert all_ < few < 5 * all_


@functools.cache
def counted(length, platform, **changes):
  """Work of slots, of a model whose heads the kernel for GPUs can read."""
  config = transformer.Config(
    V=32, D=32, L=2, H=4, K=2, W=16, F=64, dtype='bfloat16', **changes
  )
  policy = language_model.policy(config, response_length=length, slots=4)
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=GROUP)
  flow = tiny.trace(workflow, tiny.problem())
  return count.of_node(flow, generate(flow), platform=platform)


PROMPT = tiny.problem().prompt.token.shape[1]
# Keys and values of two layers with two heads of 16 numbers of two bytes.
COLUMN = 2 * 2 * 2 * 16 * 2
# Scores of two layers with four heads, in float32 and as weights in bfloat16:
# written, read for their maximum, their sum and their weights; written, read.
SCORES = 2 * 4 * (4 * 4 + 2 * 2)


def step_bytes(work):
  """Bytes that a step moves for four rows, without context."""
  return work.step.at(4).bytes_moved


def test_with_a_kernel_a_step_costs_what_its_rows_have_filled():
  short, long = counted(512, 'gpu'), counted(2048, 'gpu')
  (own,), (other,) = short.attention, long.attention
  assert own == other and own.of == 'own'
  assert own.work.bytes_moved == COLUMN
  assert own.work.matmul == {'bfloat16': 4 * 2 * 4 * 16}
  assert short.context == PROMPT
  # Without context, steps are alike, but for tokens as they are written.
  assert step_bytes(long) == pytest.approx(step_bytes(short), rel=0.1)
  whole = counted(2048, None)
  assert whole.step.full_batch.partial == long.step.full_batch.partial


def test_without_a_kernel_an_accelerator_reads_all_columns_of_all_slots():
  refused = {'score_softcap': 2.0}
  at = {n: counted(n, 'gpu', **refused) for n in (512, 2048)}
  assert not at[512].attention and not at[2048].attention
  columns = [slot_cache.columns(PROMPT + n) for n in at]
  read = step_bytes(at[2048]) - step_bytes(at[512])
  kept = step_bytes(counted(2048, 'gpu')) - step_bytes(counted(512, 'gpu'))
  each = 4 * (COLUMN + SCORES)
  assert read - kept == pytest.approx(each * (columns[1] - columns[0]))
  # Scores are in memory, of which a kernel has none.
  alive = at[2048].step.at(4).bytes_alive
  assert alive > counted(2048, 'gpu').step.at(4).bytes_alive


def test_a_cpu_reads_of_all_slots_as_much_as_the_longest_row_needs():
  (read,) = counted(2048, 'cpu').attention
  assert read.of == 'longest'
  assert read.work.bytes_moved == COLUMN + SCORES


def test_layers_with_a_window_read_their_own_columns():
  window = {'windows': (128, None)}
  local, whole = counted(2048 - PROMPT, 'gpu', **window).attention
  assert local.work == whole.work
  assert local.work.bytes_moved == COLUMN / 2
  # Sixteen programs share 2,048 columns, and one begins with its first.
  assert local.most == 128 + (2048 / 16 - 1) / 2
  assert math.isinf(whole.most)
  # On TPUs no kernel reads such layers, on a CPU a loop from the first needed.
  assert not counted(2048, 'tpu', **window).attention
  local, whole = counted(2048, 'cpu', **window).attention
  assert (local.of, local.window) == ('longest', 128)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_attention_without_a_kernel_counts_as_its_program(dtype):
  config = transformer.Config(
    V=32, D=32, L=1, H=14, K=2, W=128, F=64, dtype=dtype
  )

  def of_program(C, M=4):
    size = jax.ShapeDtypeStruct((M,), jnp.int32)
    end = jax.ShapeDtypeStruct((), jnp.int32)
    cache = kv_cache.empty(config, M, C)[0]
    query = jax.ShapeDtypeStruct((M, 2, 7, 128), dtype)
    return count.work(
      functools.partial(slot_cache._attend, config, kernels.WHOLE),
      query,
      cache,
      slot_cache.Span(size, size, end, end),
      platform='gpu',
    )

  near, far = of_program(1024), of_program(2048)
  (ours,) = attention_of(config)
  columns = 4 * 1024
  assert ours.kernels == near.kernels
  for name in ('matmul_flops', 'bytes_moved', 'other_flops'):
    per_column = (getattr(far, name) - getattr(near, name)) / columns
    mine = ours.bytes if name == 'bytes_moved' else getattr(ours, name)
    assert mine == pytest.approx(per_column, rel=0.05)


def attention_of(config):
  prompt = tiny.problem().prompt
  gpu = mesh_lib.abstract({}, 'gpu')
  config = dataclasses.replace(config, attention='chunked')
  with jax.sharding.use_abstract_mesh(gpu):
    return slot_cache.attention_work(config, 2048, None, prompt).layers
