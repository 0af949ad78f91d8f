"""Costs multiplied by factors, to ask how the best plan depends on them."""

from collections.abc import Mapping, Sequence

from planner.ir import graph


class ScaledCosts:
  """Multiplies some costs of a `cost_model.Model`, or of a `cost.Cost`.

  Calls are passed on unchanged, so the result is of the same kind.
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
      costs: a `cost_model.Model` or a `cost.Cost`.
      stages: factors of the seconds of stages, by name; 1 if not named.
      transfers: factor of transfers between places.
      switches: factor of moves between device and host memory.
    """
    self._costs, self._stages = costs, dict(stages or {})
    self._transfers, self._switches = transfers, switches

  def seconds(self, flow: graph.Flow, node: graph.Node, *where) -> float:
    found = self._costs.seconds(flow, node, *where)
    if graph.is_plumbing(node):
      return found
    return found * self._stages.get(node.name, 1.0)

  def transfer(self, flow: graph.Flow, value: int, *where) -> float:
    # The cost may be infinite, and 0 × ∞ is not a number.
    times = self._transfers
    return times and times * self._costs.transfer(flow, value, *where)

  def switch(self, flow: graph.Flow, value: int, *where) -> float:
    times = self._switches
    return times and times * self._costs.switch(flow, value, *where)

  def contention(self, *where) -> float:
    return self._costs.contention(*where)

  @property
  def capacity(self) -> float:
    return self._costs.capacity

  @property
  def alignment(self) -> int:
    return self._costs.alignment

  def axes(self, stages: tuple[str, ...], devices: int) -> Sequence:
    return self._costs.axes(stages, devices)

  def least_memory(self, *where) -> float:
    return self._costs.least_memory(*where)

  def memory(self, flow: graph.Flow, chosen, place: str) -> Mapping[str, float]:
    return self._costs.memory(flow, chosen, place)
