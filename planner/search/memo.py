"""Memoizes the queries of a cost model."""

from planner.ir import graph
from planner.ir import plan as plan_lib


class MemoizedModel:
  """Memoizes a cost model on places of consecutive devices.

  The cost of a call depends on the number of devices, and on where in a node
  they begin; the cost of a transfer depends on which devices they are. Calls
  that are alike cost the same (`graph.Flow.alike`). Nodes and flows are
  compared by identity, so they must live as long as this object.
  """

  def __init__(self, model):
    self._model = model
    self._seconds, self._moves, self._switches = {}, {}, {}
    self._contention, self._alike = {}, {}

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
    remat: str = plan_lib.STORE_ALL,
  ) -> float:
    # A flow whose nodes are reordered has the same nodes.
    if id(node) not in self._alike:
      self._alike[id(node)] = flow.alike(node)
    node = self._alike[id(node)]
    devices = placement.devices
    site = len(devices), devices[0] % self._model.alignment, placement.axes
    key = id(node), site, rows, remat
    if key not in self._seconds:
      seconds = self._model.seconds(flow, node, placement, rows, remat)
      self._seconds[key] = seconds
    return self._seconds[key]

  def transfer(
    self,
    flow: graph.Flow,
    value: int,
    source: plan_lib.Placement,
    target: plan_lib.Placement,
  ) -> float:
    # A flow whose nodes are reordered shares its tuple of values.
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

  def contention(self, stage: str, devices: int, beside: int) -> float:
    key = stage, devices, beside
    if key not in self._contention:
      self._contention[key] = self._model.contention(*key)
    return self._contention[key]


def _site(placement: plan_lib.Placement):
  devices = placement.devices
  return devices[0], len(devices), placement.axes
