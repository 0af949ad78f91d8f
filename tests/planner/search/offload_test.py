"""Moments go to host memory where memory forces them to, and nowhere else."""

import dataclasses

import pytest

from planner.search import exact
from planner.search.plans import space
from sharding import slices
from tests.planner.costs import toy_costs


def search(memory):
  """The search on one device with some memory."""
  device = dataclasses.replace(toy_costs.DEVICE, memory_bytes=memory)
  there = dataclasses.replace(toy_costs.TOYS, device=device, num_devices=1)
  return exact.search(
    toy_costs.toy_flow(),
    toy_costs.model(there),
    space.Space(1, pieces=(1,), offload=('step',)),
  )


def needed(offload):
  """The most bytes that a plan with these offloads needs on one device."""
  flow, model = toy_costs.toy_flow(), toy_costs.model()
  chosen = search(1e9).best
  chosen = dataclasses.replace(chosen, offload=offload)
  return max(model.memory(flow, chosen, 'all').values())


def test_moments_are_offloaded_only_where_memory_forces_it(monkeypatch):
  monkeypatch.setattr(slices, 'SLICE', 1)
  stays, away = needed(()), needed(('step',))
  assert away < stays
  enough = search(stays)
  assert enough.best.offload == () and enough.proved
  forced = search(stays - 1)
  assert forced.best.offload == ('step',) and forced.proved
  # They move there and back, at 1e10 bytes a second.
  extra = forced.seconds - enough.seconds
  assert extra == pytest.approx(2 * toy_costs.PARAMS / 1e10)
  assert search(away).best.offload == ('step',)
  assert search(away - 1).best is None
