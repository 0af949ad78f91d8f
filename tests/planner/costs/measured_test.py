"""Costs that were measured: between, beyond and beside what was."""

import dataclasses

import numpy as np
import pytest

from planner.costs import measured as measured_lib
from planner.costs import roofline
from sharding import rules
from tests.planner.costs import toy_costs

F32, LAYERS, D, F = np.dtype('float32'), 10, 64, 256


def table(axes=(), devices=1, points=((4, 1.0), (8, 3.0), (16, 4.0))):
  curve = measured_lib.RowCurve(points)
  return measured_lib.Measurements({('act', devices, axes): curve})


@pytest.mark.parametrize(
  'rows, seconds', [(4, 8 * 1.0), (8, 4 * 3.0), (16, 2 * 4.0)]
)
def test_measured_numbers_of_rows_cost_what_was_measured(rows, seconds):
  found = toy_costs.explained('act', rows=rows, measured=table())
  assert found.total == (seconds, 'measured')


def test_costs_are_linear_between_measured_rows():
  curve = measured_lib.RowCurve(((8, 3.0), (4, 1.0), (16, 4.0)))
  assert [curve.at(n) for n in (4, 6, 8, 12, 16)] == [1, 2, 3, 3.5, 4]


def test_beyond_measured_rows_the_model_is_scaled_and_tagged_modeled():
  curve = measured_lib.RowCurve(((4, 1.0), (8, 3.0), (16, 4.0)))
  assert curve.at(3) is None and curve.at(17) is None
  found, plain = (
    toy_costs.explained('act', measured=table()),
    toy_costs.explained('act'),
  )
  at_end = toy_costs.explained('act', rows=16)
  assert found.total.tag == 'modeled'
  scale = 4.0 / (at_end.total.value / 2)
  assert found.total.value == pytest.approx(plain.total.value * scale)


def test_measurements_on_another_mesh_scale_the_model():
  given = table((('data', 2),), 2)
  measured = toy_costs.explained(
    'act', ('data', 2), rows=4, measured=given
  ).total
  assert measured == (8.0, 'measured')
  # Three times as slow as modeled on two devices: so on one, at all rows.
  flow = toy_costs.toy_flow()
  points = []
  for rows in (8, 16, 32):
    values = [
      dataclasses.replace(v, shape=(rows, *v.shape[1:])) if i in (2, 3) else v
      for i, v in enumerate(flow.values)
    ]
    fewer = dataclasses.replace(flow, values=tuple(values))
    found = toy_costs.model().explain(
      fewer, toy_costs.node('act'), toy_costs.spot(('data', 2))
    )
    points.append((rows, 3 * found.total.value))
  given = table((('data', 2),), 2, points)
  for rows in (4, 16):
    found = toy_costs.explained('act', rows=rows, measured=given).total
    plain = toy_costs.explained('act', rows=rows).total
    assert found == (pytest.approx(3 * plain.value), 'modeled')


def test_factors_of_a_run_multiply_measurements():
  given = table((('data', 2),), 2).times({'act': 3.0}).times({'act': 0.5})
  found = toy_costs.explained('act', ('data', 2), rows=4, measured=given)
  assert found.total == (8 * 1.5, 'measured')
  assert given.factors == {'act': 1.5}


def test_devices_that_share_cores_slow_each_other_down():
  there = dataclasses.replace(toy_costs.TOYS, shared_cores=2, contention=1.5)
  shared = toy_costs.model(there)
  for axes, slower in ((), 1.0), ([('data', 2)], 1.5), ([('data', 4)], 3.0):
    alone = toy_costs.explained('act', *axes).total.value
    found = toy_costs.explained('act', *axes, there=there).total.value
    assert found == pytest.approx(slower * alone)
  assert shared.contention('act', 1, 1) == 1.5
  assert shared.contention('act', 2, 2) == 2.0
  known = shared.with_measurements(
    measured_lib.Measurements(contention={'act': 1.2})
  )
  assert known.contention('act', 1, 1) == 1.2
  assert known.contention('learn', 1, 1) == 1.5


def test_a_host_stage_counts_as_one_thread_on_any_number_of_devices():
  there = dataclasses.replace(toy_costs.TOYS, shared_cores=2, contention=1.5)
  works = toy_costs.WORKS | {'act': None}
  host = roofline.Roofline(
    toy_costs.toy_flow(), works, there, rules.DEFAULT, assumed=toy_costs.SURE
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
  rows = toy_costs.toy_flow().rows_of(toy_costs.node('act'))
  known = lambda n: (
    toy_costs.explained('act', rows=n, measured=given).total.value
  )
  assert known(4) == rows / 4 * 0.5
  assert known(8) == rows / 8 * (2.0 if rows > 8 else 3.0)


def test_a_curve_of_fewer_than_three_numbers_of_rows_is_refused():
  with pytest.raises(ValueError, match='three numbers of rows'):
    measured_lib.RowCurve(((4, 1.0), (8, 2.0)))
  with pytest.raises(ValueError, match='three numbers of rows'):
    measured_lib.RowCurve(((4, 1.0), (8, 2.0), (8, 2.0), (9, 1.0)))


def test_a_stage_without_rows_is_measured_once():
  given = measured_lib.Measurements(constants={('step', 1, ()): 7.0})
  assert toy_costs.explained('step', measured=given).total == (7.0, 'measured')


def test_uncounted_stages_are_refused():
  with pytest.raises(ValueError, match=r"\['act', 'judge', 'grad', 'step'\]"):
    roofline.Roofline(toy_costs.toy_flow(), {}, toy_costs.TOYS, rules.DEFAULT)
