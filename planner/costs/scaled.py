"""Costs of which some are larger or smaller than a model says."""

from collections.abc import Mapping, Sequence

from planner.ir import graph


class Scaled:
  """A model, or its prices under a plan, with some numbers multiplied.

  What it is asked it asks in the same words: it serves as
  `planner.search.exact.Model` and as `planner.costs.cost.Cost`.
  """

  def __init__(
    self,
    costs,
    stages: Mapping[str, float] | None = None,
    transfers: float = 1.0,
    switches: float = 1.0,
  ):
    """Takes costs and factors.

    Args:
      costs: of which some are multiplied.
      stages: factors of the seconds of stages, by name; 1 for all others.
      transfers: factor of moves between places.
      switches: factor of moves between devices and their host.
    """
    self._costs, self._stages = costs, dict(stages or {})
    self._transfers, self._switches = transfers, switches

  def seconds(self, flow: graph.Flow, node: graph.Node, *where) -> float:
    found = self._costs.seconds(flow, node, *where)
    if graph.is_plumbing(node):
      return found
    return found * self._stages.get(node.name, 1.0)

  def transfer(self, flow: graph.Flow, value: int, *where) -> float:
    # Not 0 × what may be infinite.
    times = self._transfers
    return times and times * self._costs.transfer(flow, value, *where)

  def switch(self, flow: graph.Flow, value: int, *where) -> float:
    times = self._switches
    return times and times * self._costs.switch(flow, value, *where)

  def crowding(self, *where) -> float:
    return self._costs.crowding(*where)

  @property
  def capacity(self) -> float:
    return self._costs.capacity

  def axes(self, stages: tuple[str, ...], devices: int) -> Sequence:
    return self._costs.axes(stages, devices)

  def memory(self, flow: graph.Flow, chosen, place: str) -> float:
    return self._costs.memory(flow, chosen, place)
