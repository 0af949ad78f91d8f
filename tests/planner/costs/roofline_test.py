"""Seconds and bytes are what one computes by hand from rates and sizes."""

import dataclasses
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from planner import cluster
from planner.costs import measured as measured_lib
from planner.costs import roofline
from planner.costs.mesh import collectives, layout
from planner.costs.work import StageWork, Work
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut
from sharding import rules

ROOT = pathlib.Path(__file__).parents[3]
SURE = roofline.Assumptions(
  matmul_efficiency=1.0, vector_efficiency=1.0, memory_efficiency=1.0
)
DEVICE = cluster.Device(
  'toy', {'bfloat16': 1e12, 'float32': 5e11}, 1e11, 1e9, 1e11, 1e10
)
NEAR, FAR = cluster.Link(1e-6, 1e10), cluster.Link(1e-4, 1e9)
TOYS = cluster.Cluster(DEVICE, 64, 4, NEAR, FAR, memory_reserve=0.0)


@dataclasses.dataclass(frozen=True)
class Stage:
  name: str
  grain: str = 'row'
  group_size: int = 1
  host: bool = False
  unbatched = (0,)


F32, LAYERS, D, F = np.dtype('float32'), 10, 64, 256
PARAMS = 4 * LAYERS * D * F


def value(name, shape, letters):
  return graph.Value(name, shape, F32, letters)


def toy_flow() -> graph.Flow:
  """act: params, rows -> rows; grad: params, rows -> sums; step: sums."""
  lettered = (LAYERS, D, F), ('', 'D', 'F')
  values = (
    value('state.params.up_DF', *lettered),
    value('state.moments.up_DF', *lettered),
    value('input', (32, 8), ('B', '')),
    value('act', (32, 8), ('B', '')),
    value('grad.up_DF', *lettered),
    value('step.params.up_DF', *lettered),
    value('step.moments.up_DF', *lettered),
    value('judge', (32,), ('B',)),
  )
  nodes = (
    graph.Node(Stage('act'), (0, 2), (3,), frozenset({2})),
    graph.Node(Stage('judge', host=True), (3,), (7,), frozenset({3})),
    graph.Node(
      Stage('grad', 'sum', group_size=2), (0, 3), (4,), frozenset({3})
    ),
    graph.Node(Stage('step', 'batch'), (0, 1, 4), (5, 6)),
  )
  carry = ((0, 5), (1, 6))
  return graph.Flow(nodes, values, (2,), (7,), carry)


WORKS = {
  'act': StageWork(
    Work(flops=0, bytes_moved=PARAMS, kernels=10),
    Work(flops=1e9, matmul={'bfloat16': 1e9}, bytes_moved=1e3),
    32,
  ),
  'judge': None,
  'grad': StageWork(
    Work(bytes_moved=2 * PARAMS, bytes_alive=2e4),
    Work(
      flops=4e9,
      matmul={'bfloat16': 3e9},
      bytes_alive=1e4,
      partial={'F': (LAYERS / 32, 1e6), 'D': (1.0, 1e9)},
    ),
    32,
  ),
  'step': StageWork(Work(flops=1e6, bytes_moved=5 * PARAMS)),
}


def model(there=TOYS, assumed=SURE, **kwargs) -> roofline.Roofline:
  return roofline.Roofline(
    toy_flow(), WORKS, there, rules.DEFAULT, assumed=assumed, **kwargs
  )


def node(name, flow=None):
  return next(n for n in (flow or toy_flow()).nodes if n.name == name)


def spot(*axes, first=0) -> plan_lib.Placement:
  n = math.prod(size for _, size in axes)
  return plan_lib.Placement(tuple(range(first, first + n)), axes)


def explained(name, *axes, rows=None, **kwargs):
  return model(**kwargs).explain(toy_flow(), node(name), spot(*axes), rows)


@pytest.mark.parametrize(
  'module',
  [
    'cluster',
    'costs.decoding.completions',
    'costs.mesh.memory',
    'costs.roofline',
  ],
)
def test_cost_modules_import_without_jax(module):
  code = (
    "import sys; sys.modules.update(dict.fromkeys(['jax', 'jaxlib', 'flax']));"
    f'import planner.{module}'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


# Seconds.


def test_a_stage_takes_the_longer_of_arithmetic_and_traffic():
  found = explained('act')
  assert found['arithmetic'].value == pytest.approx(32 * 1e9 / 1e12)
  assert found['traffic'].value == pytest.approx((PARAMS + 32e3) / 1e11)
  assert found.total.value == pytest.approx(0.032)
  slow = dataclasses.replace(
    TOYS, device=dataclasses.replace(DEVICE, memory_bandwidth=1e6)
  )
  found = explained('act', there=slow)
  assert found.total.value == pytest.approx((PARAMS + 32e3) / 1e6)


def test_arithmetic_outside_matmuls_has_its_own_rate():
  found = explained('grad')
  assert found['arithmetic'].value == pytest.approx(32 * (3e-3 + 1e-2))


def test_launches_and_gaps_between_kernels_add_seconds():
  device = dataclasses.replace(
    DEVICE, launch_seconds=0.5, kernel_gap_seconds=0.25
  )
  found = explained('act', there=dataclasses.replace(TOYS, device=device))
  assert found['launch'] == (0.5, 'assumed')
  assert found['gaps between kernels'] == (2.5, 'assumed')
  assert found.total.value == pytest.approx(3.0 + 0.032)


def test_data_parallel_devices_share_rows_and_each_reads_all_parameters():
  found = explained('act', ('data', 4))
  assert found['arithmetic'].value == pytest.approx(8 * 1e9 / 1e12)
  assert found['traffic'].value == pytest.approx((PARAMS + 8e3) / 1e11)
  assert set(found) == {
    'launch',
    'gaps between kernels',
    'arithmetic',
    'traffic',
  }


def test_every_micro_batch_reads_the_parameters():
  whole, parts = explained('act'), explained('act', rows=8)
  assert parts['arithmetic'].value == pytest.approx(whole['arithmetic'].value)
  assert parts['traffic'].value == pytest.approx((4 * PARAMS + 32e3) / 1e11)


def test_pieces_share_rows_and_each_reads_the_parameters():
  flow = toy_flow()
  pieces = [n for n in cut.cut(flow, 4).nodes if n.name == 'act']
  pieced = cut.cut(flow, 4)
  found = [model().explain(pieced, n, spot(), None) for n in pieces]
  assert len(found) == 4
  assert sum(f['arithmetic'].value for f in found) == pytest.approx(0.032)
  assert found[0]['traffic'].value == pytest.approx((PARAMS + 8e3) / 1e11)


def test_data_parallel_gradients_are_reduced_once_a_call():
  want = 1e-6 + 2 * 3 / 4 * PARAMS / 1e10
  for rows in (None, 8):
    found = explained('grad', ('data', 4), rows=rows)
    assert found['add up gradients (data)'].value == pytest.approx(want)


@pytest.mark.parametrize('rows, turns', [(None, 1), (8, 4)])
def test_fsdp_gathers_and_scatters_in_every_micro_batch(rows, turns):
  found = explained('grad', ('fsdp', 4), rows=rows)
  # In bfloat16, forth and back, a message a layer.
  gather = 2 * LAYERS * 1e-6 + 2 * 3 / 4 * PARAMS / 2 / 1e10
  scatter = LAYERS * 1e-6 + 3 / 4 * PARAMS / 1e10
  assert found['gather parameters (fsdp)'].value == pytest.approx(
    turns * gather
  )
  assert found['scatter gradients (fsdp)'].value == pytest.approx(
    turns * scatter
  )


def test_each_packed_row_communicates():
  grad = WORKS['grad']
  packed = dataclasses.replace(
    grad, per_row=dataclasses.replace(grad.per_row, passes=0.5)
  )
  m = roofline.Roofline(
    toy_flow(), WORKS | {'grad': packed}, TOYS, rules.DEFAULT, assumed=SURE
  )
  found = m.explain(toy_flow(), node('grad'), spot(('fsdp', 4)), None)
  for name, once in explained('grad', ('fsdp', 4)).items():
    # Of 32 rows a device has eight, in four packed rows.
    times = 4 if '(fsdp)' in name else 1
    assert found[name].value == pytest.approx(times * once.value)


def test_gradients_of_the_vocabulary_are_whole_before_they_are_scattered():
  value = graph.Value('embed_VD', (8, 4), np.dtype('float32'), ('V', 'D'))
  flow = types.SimpleNamespace(values=[value])
  grad = types.SimpleNamespace(
    reads=(), rows=(), writes=(0,), stage=types.SimpleNamespace(grain='sum')
  )
  there = collectives.Parameters(flow, grad, layout.Layout(rules.DEFAULT))
  # Two of 128 bytes, of which a quarter is this device's shard.
  assert there.unscattered((('fsdp', 4),)) == 2 * 96
  assert there.unscattered((('data', 4),)) == 0


def test_tensor_parallel_parts_are_reduced():
  found = explained('grad', ('data', 2), ('tensor', 2))
  want = LAYERS * 1e-6 + 2 * 1 / 2 * 32e6 / 2 / 1e10
  assert found['add up parts (tensor)'].value == pytest.approx(want)
  arithmetic = 32 * (3e-3 + 1e-2) / 4
  assert found['arithmetic'].value == pytest.approx(arithmetic)
  # Parameters, and so their gradients, are halves already.
  want = 1e-6 + 2 * 1 / 2 * PARAMS / 2 / 1e10
  assert found['add up gradients (data)'].value == pytest.approx(want)


def test_an_axis_of_several_nodes_is_slower():
  near, far = explained('grad', ('data', 4)), explained('grad', ('data', 8))
  # A ring leaves a node by four ports of 1e9.
  want = 1e-4 + 2 * 7 / 8 * PARAMS / 4e9
  assert far['add up gradients (data)'].value == pytest.approx(want)
  assert near['add up gradients (data)'].value < want


def test_an_axis_across_nodes_uses_one_port_per_device():
  found = explained('grad', ('data', 2), ('tensor', 4))
  want = 1e-4 + 2 * 1 / 2 * PARAMS / 4 / 1e9
  assert found['add up gradients (data)'].value == pytest.approx(want)
  tensor = found['add up parts (tensor)'].value
  assert tensor == pytest.approx(10e-6 + 2 * 3 / 4 * 32e6 / 2 / 1e10)


def test_a_stage_without_rows_is_divided_by_fsdp_alone():
  one, copies = explained('step'), explained('step', ('data', 4))
  shares = explained('step', ('fsdp', 4))
  assert copies.total.value == pytest.approx(one.total.value)
  assert shares.total.value == pytest.approx(one.total.value / 4)


def test_hidden_communication_costs_nothing():
  hidden = dataclasses.replace(SURE, exposed_communication=0.0)
  one = explained('grad', ('data', 4), assumed=hidden)
  assert one.total.value == pytest.approx(8 * (3e-3 + 1e-2))


def test_rows_that_do_not_divide_into_groups_cost_infinity():
  there, m = node('grad'), model()
  flow = toy_flow()
  assert m.seconds(flow, there, spot(('data', 16)), None) < math.inf
  assert m.seconds(flow, there, spot(('data', 32)), None) == math.inf
  assert m.seconds(flow, there, spot(('data', 4)), 4) == math.inf
  assert m.seconds(flow, there, spot(), 5) == math.inf


def test_seconds_of_a_host_stage_are_assumed():
  found = explained('judge')
  assert found.total.tag == 'assumed'
  assert found['on the host'].value == pytest.approx(32 * 1e-4)


def test_nodes_that_a_planner_adds_cost_their_traffic():
  pieced = cut.cut(toy_flow(), 2)
  there = next(n for n in pieced.nodes if n.stage.name == 'total')
  found = model().explain(pieced, there, spot(), None)
  assert found.total.value == pytest.approx(3 * PARAMS / 1e11)
  shared = model().seconds(pieced, there, spot(('fsdp', 4)), None)
  assert shared == pytest.approx(3 * PARAMS / 4 / 1e11)


def test_every_part_of_a_cost_has_a_tag():
  for name in toy_flow().stages:
    found = explained(name, ('fsdp', 4), ('tensor', 2))
    tags = {number.tag for number in (found.total, *found.values())}
    assert tags <= {'measured', 'modeled', 'assumed'}
    overlap = min(
      (found[k].value for k in ('arithmetic', 'traffic') if k in found),
      default=0.0,
    )
    total = sum(number.value for number in found.values()) - overlap
    assert found.total.value == pytest.approx(total)
    assert 'total' in str(found)


# Measured costs.


def table(axes=(), devices=1, points=((4, 1.0), (8, 3.0), (16, 4.0))):
  curve = measured_lib.RowCurve(points)
  return measured_lib.Measurements({('act', devices, axes): curve})


@pytest.mark.parametrize(
  'rows, seconds', [(4, 8 * 1.0), (8, 4 * 3.0), (16, 2 * 4.0)]
)
def test_measured_numbers_of_rows_cost_what_was_measured(rows, seconds):
  found = explained('act', rows=rows, measured=table())
  assert found.total == (seconds, 'measured')


def test_costs_are_linear_between_measured_rows():
  curve = measured_lib.RowCurve(((8, 3.0), (4, 1.0), (16, 4.0)))
  assert [curve.at(n) for n in (4, 6, 8, 12, 16)] == [1, 2, 3, 3.5, 4]


def test_beyond_measured_rows_the_model_is_scaled_and_tagged_modeled():
  curve = measured_lib.RowCurve(((4, 1.0), (8, 3.0), (16, 4.0)))
  assert curve.at(3) is None and curve.at(17) is None
  found, plain = explained('act', measured=table()), explained('act')
  at_end = explained('act', rows=16)
  assert found.total.tag == 'modeled'
  scale = 4.0 / (at_end.total.value / 2)
  assert found.total.value == pytest.approx(plain.total.value * scale)


def test_measurements_on_another_mesh_scale_the_model():
  given = table((('data', 2),), 2)
  measured = explained('act', ('data', 2), rows=4, measured=given).total
  assert measured == (8.0, 'measured')
  # Three times as slow as modeled on two devices: so on one, at all rows.
  flow = toy_flow()
  points = []
  for rows in (8, 16, 32):
    values = [
      dataclasses.replace(v, shape=(rows, *v.shape[1:])) if i in (2, 3) else v
      for i, v in enumerate(flow.values)
    ]
    fewer = dataclasses.replace(flow, values=tuple(values))
    found = model().explain(fewer, node('act'), spot(('data', 2)))
    points.append((rows, 3 * found.total.value))
  given = table((('data', 2),), 2, points)
  for rows in (4, 16):
    found = explained('act', rows=rows, measured=given).total
    plain = explained('act', rows=rows).total
    assert found == (pytest.approx(3 * plain.value), 'modeled')


def test_factors_of_a_run_multiply_measurements():
  given = table((('data', 2),), 2).times({'act': 3.0}).times({'act': 0.5})
  found = explained('act', ('data', 2), rows=4, measured=given)
  assert found.total == (8 * 1.5, 'measured')
  assert given.factors == {'act': 1.5}


def test_devices_that_share_cores_slow_each_other_down():
  there = dataclasses.replace(TOYS, shared_cores=2, contention=1.5)
  shared = model(there)
  for axes, slower in ((), 1.0), ([('data', 2)], 1.5), ([('data', 4)], 3.0):
    alone = explained('act', *axes).total.value
    found = explained('act', *axes, there=there).total.value
    assert found == pytest.approx(slower * alone)
  assert shared.contention('act', 1, 1) == 1.5
  assert shared.contention('act', 2, 2) == 2.0
  known = shared.with_measurements(
    measured_lib.Measurements(contention={'act': 1.2})
  )
  assert known.contention('act', 1, 1) == 1.2
  assert known.contention('learn', 1, 1) == 1.5


def test_a_host_stage_counts_as_one_thread_on_any_number_of_devices():
  there = dataclasses.replace(TOYS, shared_cores=2, contention=1.5)
  works = WORKS | {'act': None}
  host = roofline.Roofline(
    toy_flow(), works, there, rules.DEFAULT, assumed=SURE
  )
  assert host.contention('act', 2, 0) == host.contention('act', 1, 0) == 1.0
  assert host.contention('act', 2, 1) == 1.5


def test_several_micro_batches_cost_what_was_measured_in_a_row():
  key = 'act', 1, ()
  in_turns = measured_lib.RowCurve(((4, 0.5), (8, 2.0), (16, 4.0)))
  given = measured_lib.Measurements(
    {key: measured_lib.RowCurve(((4, 1.0), (8, 3.0), (16, 4.0)))},
    turns={key: in_turns},
  )
  rows = toy_flow().rows_of(node('act'))
  known = lambda n: explained('act', rows=n, measured=given).total.value
  assert known(4) == rows / 4 * 0.5
  assert known(8) == rows / 8 * (2.0 if rows > 8 else 3.0)


def test_a_curve_of_fewer_than_three_numbers_of_rows_is_refused():
  with pytest.raises(ValueError, match='three numbers of rows'):
    measured_lib.RowCurve(((4, 1.0), (8, 2.0)))
  with pytest.raises(ValueError, match='three numbers of rows'):
    measured_lib.RowCurve(((4, 1.0), (8, 2.0), (8, 2.0), (9, 1.0)))


def test_a_stage_without_rows_is_measured_once():
  given = measured_lib.Measurements(constants={('step', 1, ()): 7.0})
  assert explained('step', measured=given).total == (7.0, 'measured')


def test_uncounted_stages_are_refused():
  with pytest.raises(ValueError, match=r"\['act', 'judge', 'grad', 'step'\]"):
    roofline.Roofline(toy_flow(), {}, TOYS, rules.DEFAULT)


# Moves.


def test_a_transfer_takes_as_long_as_its_busiest_device():
  flow, m = toy_flow(), model()
  here, there = spot(('fsdp', 2)), spot(('data', 2), first=2)
  assert m.transfer(flow, 0, here, here) == 0
  assert m.transfer(flow, 0, here, there) == pytest.approx(1e-6 + PARAMS / 1e10)
  shares = spot(('fsdp', 2), first=2)
  assert m.transfer(flow, 0, there, shares) == pytest.approx(
    1e-6 + PARAMS / 2 / 1e10
  )
  far = spot(('data', 4), first=4)
  assert m.transfer(flow, 0, spot(), far) == pytest.approx(
    1e-4 + 4 * PARAMS / 1e9
  )


def test_offloading_moves_the_bytes_of_one_device():
  flow, m = toy_flow(), model()
  assert m.switch(flow, 1, spot()) == pytest.approx(PARAMS / 1e10)
  assert m.switch(flow, 1, spot(('fsdp', 4))) == pytest.approx(
    PARAMS / 4 / 1e10
  )


# Memory.


def one_place(*axes, **kwargs):
  flow = toy_flow()
  chosen = dataclasses.replace(
    plan_lib.one_place(flow.stages, spot(*axes)), **kwargs
  )
  return model().explain_memory(flow, chosen, 'all')


def test_memory_by_hand():
  # Parameters, moments, gradients; rows of `act` and of `judge`.
  found = one_place()
  values = PARAMS + 32 * 8 * 4 + 32 * 4
  want = 2 * PARAMS + values + 32 * 1e4 + 2e4
  assert found.total.value == pytest.approx(want)
  assert 'activations, during grad' in found


def test_data_parallelism_divides_rows_and_fsdp_divides_all_memory():
  one = one_place().total.value
  copies = one_place(('data', 4)).total.value
  shares = one_place(('fsdp', 4)).total.value
  assert shares < copies < one
  assert copies > 3 * PARAMS


def test_micro_batches_shrink_activations():
  found = one_place(micro_batch={'grad': 2})
  assert found['activations, during grad'].value == pytest.approx(4e4)
  assert found['sums of a micro-batch, during grad'].value == PARAMS
  pieces = one_place(pieces=4)
  assert pieces['activations, during grad'].value == pytest.approx(10e4)


def test_offloaded_values_occupy_memory_only_during_their_stage():
  away = one_place(offload=('step',))
  # The worst moment is now another: moments, no activations.
  assert away['carried values, during step'].value == PARAMS
  assert away['restored values, during step'].value == PARAMS
  assert away['values between stages, during step'].value == PARAMS + 128
  assert away.total.value == 3 * PARAMS + 128 < one_place().total.value


def test_a_place_holds_only_values_of_its_stages():
  flow = toy_flow()
  places = {'a': spot(), 'b': spot(first=1)}
  chosen = plan_lib.Plan(
    places, {'act': 'a', 'judge': 'a', 'grad': 'b', 'step': 'b'}
  )
  m = model()
  rollout, learner = (
    max(m.memory(flow, chosen, place).values()) for place in 'ab'
  )
  assert PARAMS < rollout < 2 * PARAMS < learner
  assert m.capacity == 1e9


def test_meshes_of_1024_devices_divide_their_dimensions():
  m = model(dataclasses.replace(TOYS, num_devices=1024))
  menu = m.axes(('step',), 1024)
  assert menu and all(dict(axes).get('fsdp', 1) <= D for axes in menu)
  assert m.axes(('act',), 1024) == ()  # There are 32 rows.
