"""Costs that a search memoizes are those of the model."""

import dataclasses

import pytest

from planner.search import memo
from planner.search.plans import choices
from planner.search.plans import space as space_lib
from tests.planner.costs import toy_costs


def test_places_that_cross_from_node_to_node_have_seconds_of_their_own():
  model, flow = toy_costs.model(), toy_costs.toy_flow()
  known, node = memo.MemoizedModel(model), toy_costs.node('grad', flow)
  found = [
    (
      known.seconds(flow, node, place, None),
      model.seconds(flow, node, place, None),
    )
    for place in (toy_costs.spot(('data', 2), first=i) for i in (0, 3, 4))
  ]
  assert all(one == other for one, other in found)
  assert found[0] == found[2] and found[0][0] < found[1][0]


@pytest.mark.parametrize('unit', [1, 2, 4])
def test_bounds_hold_wherever_a_place_begins(unit):
  there = dataclasses.replace(toy_costs.TOYS, num_devices=8)
  model, flow = toy_costs.model(there), toy_costs.toy_flow()
  some = choices.Choices(flow, model, space_lib.Space(8, unit=unit))
  cut, axes = some.cuts[1], (('data', 2 * unit),)
  for kind, i in enumerate(cut.first):
    least = some.seconds(cut, kind, 2, axes, (None,))
    seconds = [
      model.seconds(
        cut.flow, cut.flow.nodes[i], some.placement(b, 2, axes), None
      )
      for b in range(8 // unit - 1)
    ]
    assert least == min(seconds)
