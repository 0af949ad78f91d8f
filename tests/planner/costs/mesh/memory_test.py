"""Bytes that a place holds, and seconds that they take to move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner.costs import roofline
from planner.costs.mesh import call_memory
from planner.costs.mesh import layout as layout_lib
from planner.counting import count
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from sharding import rules, slices
import stages
from stages import workflows
from stages.language import language_model
from tests.planner.costs import toy_costs
import tiny

F32, LAYERS, D, F = np.dtype('float32'), 10, 64, 256


# Moves.


def test_a_transfer_takes_as_long_as_its_busiest_device():
  flow, m = toy_costs.toy_flow(), toy_costs.model()
  here, there = (
    toy_costs.spot(('fsdp', 2)),
    toy_costs.spot(('data', 2), first=2),
  )
  assert m.transfer(flow, 0, here, here) == 0
  assert m.transfer(flow, 0, here, there) == pytest.approx(
    1e-6 + toy_costs.PARAMS / 1e10
  )
  shares = toy_costs.spot(('fsdp', 2), first=2)
  assert m.transfer(flow, 0, there, shares) == pytest.approx(
    1e-6 + toy_costs.PARAMS / 2 / 1e10
  )
  far = toy_costs.spot(('data', 4), first=4)
  assert m.transfer(flow, 0, toy_costs.spot(), far) == pytest.approx(
    1e-4 + 4 * toy_costs.PARAMS / 1e9
  )


def test_offloading_moves_the_bytes_of_one_device():
  flow, m = toy_costs.toy_flow(), toy_costs.model()
  assert m.switch(flow, 1, toy_costs.spot()) == pytest.approx(
    toy_costs.PARAMS / 1e10
  )
  assert m.switch(flow, 1, toy_costs.spot(('fsdp', 4))) == pytest.approx(
    toy_costs.PARAMS / 4 / 1e10
  )


def one_place(*axes, **kwargs):
  flow = toy_costs.toy_flow()
  chosen = dataclasses.replace(
    plan_lib.one_place(flow.stages, toy_costs.spot(*axes)), **kwargs
  )
  return toy_costs.model().explain_memory(flow, chosen, 'all')


# Memory.


def test_memory_by_hand():
  # Parameters, moments, gradients; rows of `act` and of `judge`.
  found = one_place()
  values = toy_costs.PARAMS + 32 * 8 * 4 + 32 * 4
  want = 2 * toy_costs.PARAMS + values + 32 * 1e4 + 2e4
  assert found.total.value == pytest.approx(want)
  assert 'activations, during grad' in found


def test_data_parallelism_divides_rows_and_fsdp_divides_all_memory():
  one = one_place().total.value
  copies = one_place(('data', 4)).total.value
  shares = one_place(('fsdp', 4)).total.value
  assert shares < copies < one
  assert copies > 3 * toy_costs.PARAMS


def test_micro_batches_shrink_activations():
  found = one_place(micro_batch={'grad': 2})
  assert found['activations, during grad'].value == pytest.approx(4e4)
  assert found['sums of a micro-batch, during grad'].value == toy_costs.PARAMS
  pieces = one_place(pieces=4)
  assert pieces['activations, during grad'].value == pytest.approx(10e4)


@pytest.mark.parametrize('n', [1, 4])
def test_of_offloaded_moments_a_slice_is_on_the_device(monkeypatch, n):
  monkeypatch.setattr(slices, 'SLICE', 1)
  flow, model = toy_costs.toy_flow(), toy_costs.model()
  stays = plan_lib.one_place(flow.stages, toy_costs.spot(('fsdp', n)))
  away = dataclasses.replace(stays, offload=('step',))
  most, less = (
    model.memory(flow, chosen, 'all')['step'] for chosen in (stays, away)
  )
  # One of ten layers is there, before and after its update.
  moments = toy_costs.PARAMS / n
  assert most - less == pytest.approx(moments - 2 * moments / toy_costs.LAYERS)


def test_moments_that_are_read_whole_are_there_before_and_after_an_update():
  away = one_place(offload=('step',))  # Less than the size of a slice.
  assert away['carried values, during step'].value == toy_costs.PARAMS
  assert away['restored values, during step'].value == 0
  there = away['slices of offloaded values, during step'].value
  assert there == 2 * toy_costs.PARAMS
  between = away['values between stages, during step'].value
  assert between == toy_costs.PARAMS + 128


def test_a_place_holds_only_values_of_its_stages():
  flow = toy_costs.toy_flow()
  places = {'a': toy_costs.spot(), 'b': toy_costs.spot(first=1)}
  chosen = plan_lib.Plan(
    places, {'act': 'a', 'judge': 'a', 'grad': 'b', 'step': 'b'}
  )
  m = toy_costs.model()
  rollout, learner = (
    max(m.memory(flow, chosen, place).values()) for place in 'ab'
  )
  assert toy_costs.PARAMS < rollout < 2 * toy_costs.PARAMS < learner
  assert m.capacity == 1e9


def test_meshes_of_1024_devices_divide_their_dimensions():
  m = toy_costs.model(dataclasses.replace(toy_costs.TOYS, num_devices=1024))
  menu = m.axes(('step',), 1024)
  assert menu and all(dict(axes).get('fsdp', 1) <= D for axes in menu)
  assert m.axes(('act',), 1024) == ()  # There are 32 rows.


@pytest.mark.parametrize('dtype, item', [('bfloat16', 2), ('float32', 4)])
def test_a_device_that_decodes_has_all_that_it_makes_of_parameters(dtype, item):
  config = dataclasses.replace(tiny.CONFIG, dtype=dtype)
  policy = language_model.policy(config, response_length=6)
  workflow = workflows.grpo(policy, tiny.even, optax.sgd(0.1), group_size=4)
  flow = tiny.trace(workflow, tiny.problem())
  (node,) = (x for x in flow.nodes if x.name == 'generate')
  works = {'generate': count.of_node(flow, node)}

  def own(rows, *axes):
    execution = plan_lib.Execution(rows)
    layout = layout_lib.Layout(rules.DEFAULT)
    found = call_memory.within(flow, node, axes, execution, 1, works, layout)
    return {what: number.value for what, number in found.items()}

  alone, shared = own(8), own(32, ('fsdp', 4))
  assert shared['activations'] == alone['activations'] > 0
  # In float32, nothing is rounded: tables stay in memory as they are gathered.
  tables = config.V * config.D * item * (2 - config.tie_embeddings)
  gathered = tables if dtype == 'float32' else 0
  assert shared['gathered parameters'] == gathered
  assert not alone['gathered parameters']


# Values that succeed others.


def two_versions(*, learn_from: int):
  """A state of two versions of 1 MiB: one is learned from, the other acts."""
  act = stages.Stage(lambda w, x: x + w[0, 0], 'act', unbatched=(0,))
  gradient = stages.Stage(
    lambda w, x: jnp.sum(x) * w, 'gradient', 'sum', unbatched=(0,)
  )
  apply = stages.Stage(lambda w, g: w - g, 'apply', 'batch')

  def step(state, x, key):
    del key
    new = apply(state[learn_from], gradient(state[learn_from], x))
    y = act(state[1 - learn_from], x)
    return (state[1] if learn_from else new, new), y

  w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  return flow_lib.trace(
    step, (w, w), jax.ShapeDtypeStruct((8, 2), jnp.float32), key
  )


def peaks(flow, chosen):
  model = roofline.Roofline(
    flow, count.of_flow(flow), toy_costs.TOYS, rules.DEFAULT
  )
  return {
    name: max(model.memory(flow, chosen, name).values()) / 2**20
    for name in chosen.places
  }


def test_the_next_version_comes_while_the_older_one_acts():
  """The learner sends it at the start of the step, while the actor computes."""
  flow = two_versions(learn_from=1)
  chosen = plan_lib.parse(
    {
      'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
      'stages': {'act': 'actor', '*': 'learner'},
    },
    flow.stages,
  )
  assert peaks(flow, chosen)['actor'] == pytest.approx(2, abs=0.01)


def test_an_update_that_is_kept_twice_has_a_memory():
  flow = two_versions(learn_from=0)
  (peak,) = peaks(flow, plan_lib.one_place(flow.stages)).values()
  # Two versions, and the gradient.
  assert peak >= 3
