"""A model that is asked everything once."""

from planner.ir import graph
from planner.ir import plan as plan_lib


class Known:
  """Answers of a model on places of consecutive devices, kept.

  What a call costs does not depend on which devices they are; what a move
  costs does. Nodes and flows are told apart by identity, and must outlive this.
  """

  def __init__(self, model):
    self._model = model
    self._seconds, self._moves, self._switches = {}, {}, {}
    self._crowds = {}

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
  ) -> float:
    key = id(node), len(placement.devices), placement.axes, rows
    if key not in self._seconds:
      self._seconds[key] = self._model.seconds(flow, node, placement, rows)
    return self._seconds[key]

  def transfer(
    self,
    flow: graph.Flow,
    value: int,
    source: plan_lib.Placement,
    target: plan_lib.Placement,
  ) -> float:
    # A flow in another order has the same values.
    key = id(flow.values), value, _site(source), _site(target)
    if key not in self._moves:
      self._moves[key] = self._model.transfer(flow, value, source, target)
    return self._moves[key]

  def switch(
    self, flow: graph.Flow, value: int, placement: plan_lib.Placement
  ) -> float:
    key = id(flow.values), value, _site(placement)
    if key not in self._switches:
      self._switches[key] = self._model.switch(flow, value, placement)
    return self._switches[key]

  def crowding(self, stage: str, devices: int, beside: int) -> float:
    key = stage, devices, beside
    if key not in self._crowds:
      self._crowds[key] = self._model.crowding(*key)
    return self._crowds[key]


def _site(placement: plan_lib.Placement):
  devices = placement.devices
  return devices[0], len(devices), placement.axes
