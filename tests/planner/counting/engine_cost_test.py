"""The modeled cost of an inference engine outside JAX."""

import jax
import jax.numpy as jnp
import optax
import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.decoding import decode
from planner.counting import count
from planner.ir import plan as plan_lib
from sharding import rules
import stages
from stages import base, workflows
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


def model(max_rows=64, engine=True, devices=2):
  """The flow of GRPO whose prompts an engine completes, and its costs."""
  policy = tiny.policy(length=LENGTH)
  cost = stages.EngineCost(policy.act, CACHE, 1e6, max_rows)
  policy = policy._replace(
    act=None, out_shapes=shapes, engine=cost if engine else None
  )
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=GROUP)
  flow = tiny.trace(workflow, tiny.problem())
  there = cluster_lib.Cluster(DEVICE, devices, devices, LINK, LINK)
  return flow, roofline.Roofline(
    flow, count.of_flow(flow), there, rules.DEFAULT
  )


def generate(flow):
  return next(node for node in flow.nodes if node.name == 'generate')


def seconds(flow, costs, placement=plan_lib.Placement(), rows=None):
  return costs.seconds(flow, generate(flow), placement, rows)


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


def test_more_devices_do_not_help_an_engine_that_runs_on_one():
  flow, costs = model()
  two = plan_lib.Placement((0, 1), (('data', 2),))
  assert seconds(flow, costs, two) == seconds(flow, costs)


def test_an_engine_needs_its_cache_and_its_own_parameters():
  flow, costs = model()
  plan = plan_lib.one_place(flow.stages, plan_lib.Placement())
  parts = costs.explain_memory(flow, plan, 'all')
  params = jax.eval_shape(tiny.policy().init, jax.random.key(0))
  size = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
  found = {name.split(',')[0]: number.value for name, number in parts.items()}
  assert found['keys and values of the engine'] == CACHE
  assert found["the engine's copy of parameters"] == pytest.approx(
    size, rel=0.01
  )


def slotted(slots, **mesh):
  """Seconds and memory of our own loop with slots, of 32 rows."""
  workflow = workflows.grpo(
    tiny.policy(length=LENGTH, slots=slots),
    tiny.even,
    optax.sgd(0.1),
    group_size=GROUP,
  )
  flow = tiny.trace(workflow, tiny.problem())
  there = cluster_lib.Cluster(DEVICE, 2, 2, LINK, LINK)
  costs = roofline.Roofline(flow, count.of_flow(flow), there, rules.DEFAULT)
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
  turns = seconds(flow, static, rows=4)
  assert equal == pytest.approx(turns, rel=0.05)
  # Of rows with a long tail, slots take fewer steps than micro-batches.
  tail = seconds(flow, with_lengths(flow, few, long_tail))
  batches = seconds(flow, with_lengths(flow, static, long_tail), rows=4)
  assert 0.3 * batches < tail < 0.7 * batches
  # As many slots as rows are a static batch.
  whole = seconds(*slotted(rows))
  assert whole == pytest.approx(seconds(flow, static), rel=1e-3)


def test_slots_need_memory_for_their_own_rows_alone():
  def live(slots):
    flow, costs = slotted(slots)
    call = costs.works['generate']
    if slots is None:
      call = decode.with_lengths(call, [LENGTH])
    parts = call.bytes(flow, generate(flow), (), costs.layout, 1, None)
    return parts['activations'].value

  assert live(4) < live(16) < live(None) == live(64)
