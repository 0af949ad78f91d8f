import dataclasses

import pytest

from planner.explain import offload
from planner.ir import plan as plan_lib
from sharding import slices
from tests.planner.costs import toy_costs


def test_what_is_in_host_memory_is_told_with_what_it_costs(monkeypatch):
  monkeypatch.setattr(slices, 'SLICE', 1)
  flow, model = toy_costs.toy_flow(), toy_costs.model()
  chosen = dataclasses.replace(
    plan_lib.one_place(flow.stages, toy_costs.spot(('fsdp', 2))),
    offload=('step',),
  )
  (found,) = offload.to_data(flow, model, chosen)
  moments = toy_costs.PARAMS / 2
  assert found['stage'] == 'step' and found['bytes'] == moments
  # A layer of ten, before and after its update; there and back at 1e10 bytes a
  # second.
  assert found['bytes_on_device'] == pytest.approx(2 * moments / 10)
  assert found['seconds'] == pytest.approx(2 * moments / 1e10)
  assert offload.text([found]) == [
    'step has 320 KiB a device in host memory, and 64 KiB of it on the device '
    'at a time; moving it takes 65.5 µs a step.'
  ]


def test_a_plan_that_offloads_nothing_says_nothing():
  flow = toy_costs.toy_flow()
  chosen = plan_lib.one_place(flow.stages, toy_costs.spot())
  assert offload.to_data(flow, toy_costs.model(), chosen) == []
