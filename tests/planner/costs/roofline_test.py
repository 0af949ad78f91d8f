"""Seconds and bytes are what one computes by hand from rates and sizes."""

import dataclasses
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from planner.costs import roofline
from planner.lower import cut
from sharding import rules
from tests.planner.costs import toy_costs

ROOT = pathlib.Path(__file__).parents[3]


F32, LAYERS, D, F = np.dtype('float32'), 10, 64, 256


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
  found = toy_costs.explained('act')
  assert found['arithmetic'].value == pytest.approx(32 * 1e9 / 1e12)
  assert found['traffic'].value == pytest.approx(
    (toy_costs.PARAMS + 32e3) / 1e11
  )
  assert found.total.value == pytest.approx(0.032)
  slow = dataclasses.replace(
    toy_costs.TOYS,
    device=dataclasses.replace(toy_costs.DEVICE, memory_bandwidth=1e6),
  )
  found = toy_costs.explained('act', there=slow)
  assert found.total.value == pytest.approx((toy_costs.PARAMS + 32e3) / 1e6)


def test_arithmetic_outside_matmuls_has_its_own_rate():
  found = toy_costs.explained('grad')
  assert found['arithmetic'].value == pytest.approx(32 * (3e-3 + 1e-2))


def test_launches_and_gaps_between_kernels_add_seconds():
  device = dataclasses.replace(
    toy_costs.DEVICE, launch_seconds=0.5, kernel_gap_seconds=0.25
  )
  found = toy_costs.explained(
    'act', there=dataclasses.replace(toy_costs.TOYS, device=device)
  )
  assert found['launch'] == (0.5, 'assumed')
  assert found['gaps between kernels'] == (2.5, 'assumed')
  assert found.total.value == pytest.approx(3.0 + 0.032)


def test_data_parallel_devices_share_rows_and_each_reads_all_parameters():
  found = toy_costs.explained('act', ('data', 4))
  assert found['arithmetic'].value == pytest.approx(8 * 1e9 / 1e12)
  assert found['traffic'].value == pytest.approx(
    (toy_costs.PARAMS + 8e3) / 1e11
  )
  assert set(found) == {
    'launch',
    'gaps between kernels',
    'arithmetic',
    'traffic',
  }


def test_every_micro_batch_reads_the_parameters():
  whole, parts = toy_costs.explained('act'), toy_costs.explained('act', rows=8)
  assert parts['arithmetic'].value == pytest.approx(whole['arithmetic'].value)
  assert parts['traffic'].value == pytest.approx(
    (4 * toy_costs.PARAMS + 32e3) / 1e11
  )


def test_pieces_share_rows_and_each_reads_the_parameters():
  flow = toy_costs.toy_flow()
  pieces = [n for n in cut.cut(flow, 4).nodes if n.name == 'act']
  pieced = cut.cut(flow, 4)
  found = [
    toy_costs.model().explain(pieced, n, toy_costs.spot(), None) for n in pieces
  ]
  assert len(found) == 4
  assert sum(f['arithmetic'].value for f in found) == pytest.approx(0.032)
  assert found[0]['traffic'].value == pytest.approx(
    (toy_costs.PARAMS + 8e3) / 1e11
  )


@pytest.mark.parametrize('rows, turns', [(None, 1), (8, 4)])
def test_data_parallel_gradients_are_reduced_in_every_micro_batch(rows, turns):
  found = toy_costs.explained('grad', ('data', 4), rows=rows)
  each = 1e-6 + 2 * 3 / 4 * toy_costs.PARAMS / 2 / 1e10  # In bfloat16.
  want = pytest.approx(turns * each)
  assert found['add up gradients (data)'].value == want


@pytest.mark.parametrize('rows, turns', [(None, 1), (8, 4)])
def test_fsdp_gathers_and_scatters_in_every_micro_batch(rows, turns):
  found = toy_costs.explained('grad', ('fsdp', 4), rows=rows)
  # In bfloat16, forth and back, a message a layer; gradients of layers, too.
  gather = 2 * LAYERS * 1e-6 + 2 * 3 / 4 * toy_costs.PARAMS / 2 / 1e10
  scatter = LAYERS * 1e-6 + 3 / 4 * toy_costs.PARAMS / 2 / 1e10
  assert found['gather parameters (fsdp)'].value == pytest.approx(
    turns * gather
  )
  assert found['scatter gradients (fsdp)'].value == pytest.approx(
    turns * scatter
  )


def test_each_packed_row_communicates():
  grad = toy_costs.WORKS['grad']
  packed = dataclasses.replace(
    grad, per_row=dataclasses.replace(grad.per_row, passes=0.5)
  )
  m = roofline.Roofline(
    toy_costs.toy_flow(),
    toy_costs.WORKS | {'grad': packed},
    toy_costs.TOYS,
    rules.DEFAULT,
    assumed=toy_costs.SURE,
  )
  found = m.explain(
    toy_costs.toy_flow(),
    toy_costs.node('grad'),
    toy_costs.spot(('fsdp', 4)),
    None,
  )
  for name, once in toy_costs.explained('grad', ('fsdp', 4)).items():
    # Of 32 rows a device has eight, in four packed rows. The backward pass of
    # each begins with a forward pass, which gathers layers a third time.
    times = 4 if '(fsdp)' in name else 1
    times *= 3 / 2 if 'gather' in name else 1
    assert found[name].value == pytest.approx(times * once.value)


def test_tensor_parallel_parts_are_reduced():
  found = toy_costs.explained('grad', ('data', 2), ('tensor', 2))
  want = LAYERS * 1e-6 + 2 * 1 / 2 * 32e6 / 2 / 1e10
  assert found['add up parts (tensor)'].value == pytest.approx(want)
  arithmetic = 32 * (3e-3 + 1e-2) / 4
  assert found['arithmetic'].value == pytest.approx(arithmetic)
  # Parameters, and so their gradients, are halves already; in bfloat16.
  want = 1e-6 + 2 * 1 / 2 * toy_costs.PARAMS / 2 / 2 / 1e10
  assert found['add up gradients (data)'].value == pytest.approx(want)


def test_an_axis_of_several_nodes_is_slower():
  near, far = (
    toy_costs.explained('grad', ('data', 4)),
    toy_costs.explained('grad', ('data', 8)),
  )
  # A ring leaves a node by four ports of 1e9.
  want = 1e-4 + 2 * 7 / 8 * toy_costs.PARAMS / 2 / 4e9
  assert far['add up gradients (data)'].value == pytest.approx(want)
  assert near['add up gradients (data)'].value < want


def test_an_axis_across_nodes_uses_one_port_per_device():
  found = toy_costs.explained('grad', ('data', 2), ('tensor', 4))
  want = 1e-4 + 2 * 1 / 2 * toy_costs.PARAMS / 4 / 2 / 1e9
  assert found['add up gradients (data)'].value == pytest.approx(want)
  tensor = found['add up parts (tensor)'].value
  assert tensor == pytest.approx(10e-6 + 2 * 3 / 4 * 32e6 / 2 / 1e10)


def test_a_stage_without_rows_is_divided_by_fsdp_alone():
  one, copies = (
    toy_costs.explained('step'),
    toy_costs.explained('step', ('data', 4)),
  )
  shares = toy_costs.explained('step', ('fsdp', 4))
  assert copies.total.value == pytest.approx(one.total.value)
  assert shares.total.value == pytest.approx(one.total.value / 4)


def test_hidden_communication_costs_nothing():
  hidden = dataclasses.replace(toy_costs.SURE, exposed_communication=0.0)
  one = toy_costs.explained('grad', ('data', 4), assumed=hidden)
  assert one.total.value == pytest.approx(8 * (3e-3 + 1e-2))


def test_rows_that_do_not_divide_into_groups_cost_infinity():
  there, m = toy_costs.node('grad'), toy_costs.model()
  flow = toy_costs.toy_flow()
  assert m.seconds(flow, there, toy_costs.spot(('data', 16)), None) < math.inf
  assert m.seconds(flow, there, toy_costs.spot(('data', 32)), None) == math.inf
  assert m.seconds(flow, there, toy_costs.spot(('data', 4)), 4) == math.inf
  assert m.seconds(flow, there, toy_costs.spot(), 5) == math.inf


def test_seconds_of_a_host_stage_are_assumed():
  found = toy_costs.explained('judge')
  assert found.total.tag == 'assumed'
  assert found['on the host'].value == pytest.approx(32 * 1e-4)


def test_nodes_that_a_planner_adds_cost_their_traffic():
  pieced = cut.cut(toy_costs.toy_flow(), 2)
  there = next(n for n in pieced.nodes if n.stage.name == 'total')
  found = toy_costs.model().explain(pieced, there, toy_costs.spot(), None)
  assert found.total.value == pytest.approx(3 * toy_costs.PARAMS / 1e11)
  shared = toy_costs.model().seconds(
    pieced, there, toy_costs.spot(('fsdp', 4)), None
  )
  assert shared == pytest.approx(3 * toy_costs.PARAMS / 4 / 1e11)


def test_every_part_of_a_cost_has_a_tag():
  for name in toy_costs.toy_flow().stages:
    found = toy_costs.explained(name, ('fsdp', 4), ('tensor', 2))
    tags = {number.tag for number in (found.total, *found.values())}
    assert tags <= {'measured', 'modeled', 'assumed'}
    overlap = min(
      (found[k].value for k in ('arithmetic', 'traffic') if k in found),
      default=0.0,
    )
    total = sum(number.value for number in found.values()) - overlap
    assert found.total.value == pytest.approx(total)
    assert 'total' in str(found)
