"""The costs of a flow's nodes and values under one plan.

A cost model knows placements; `costs.cost_table` is a cost of it and of a plan,
which knows places by name.
"""

from typing import Protocol

from planner.ir import graph


class Cost(Protocol):
  """The costs of a flow's nodes and values under one plan.

  `order` and `simulate` use it.
  """

  def seconds(self, flow: graph.Flow, node: graph.Node, place: str) -> float:
    """Returns the time of a call of a stage."""

  def transfer(
    self, flow: graph.Flow, value: int, source: str, target: str
  ) -> float:
    """Returns the time of moving a value from place to place."""

  def switch(self, flow: graph.Flow, value: int, place: str) -> float:
    """Returns the time of moving a value between device and host memory."""

  def contention(
    self, node: graph.Node, place: str, beside: tuple[str, ...]
  ) -> float:
    """Returns how many times as long a call takes while others run.

    Args:
      node: the call.
      place: where it runs.
      beside: the other places that run a call.
    """


class UnitCost:
  """One second for each stage, shared by its pieces; moves take no time."""

  def seconds(self, flow, node, place):
    del flow, place
    return 0.0 if graph.is_plumbing(node) else 1.0 / node.piece[1]

  def transfer(self, flow, value, source, target):
    del flow, value, source, target
    return 0.0

  def switch(self, flow, value, place):
    del flow, value, place
    return 0.0

  def contention(self, node, place, beside):
    del node, place, beside
    return 1.0


UNIT = UnitCost()
