"""What nodes and moves of values cost, in seconds."""

from typing import Protocol

from planner.ir import graph


class Cost(Protocol):
  """What `order` and `simulate` ask."""

  def seconds(self, flow: graph.Flow, node: graph.Node, place: str) -> float:
    """Of a call of a stage."""

  def transfer(
    self, flow: graph.Flow, value: int, source: str, target: str
  ) -> float:
    """Between a value's leaving one place and its being at another."""

  def switch(self, flow: graph.Flow, value: int, place: str) -> float:
    """Of moving a value between device and host memory."""

  def crowding(
    self, node: graph.Node, place: str, beside: tuple[str, ...]
  ) -> float:
    """How many times as long a call takes while those places work, too."""


class Equal:
  """As if all stages took equally long, and moves no time at all."""

  def seconds(self, flow, node, place):
    del flow, place
    return 0.0 if graph.is_plumbing(node) else 1.0 / node.piece[1]

  def transfer(self, flow, value, source, target):
    del flow, value, source, target
    return 0.0

  def switch(self, flow, value, place):
    del flow, value, place
    return 0.0

  def crowding(self, node, place, beside):
    del node, place, beside
    return 1.0


EQUAL = Equal()
