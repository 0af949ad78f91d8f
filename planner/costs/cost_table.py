"""A model's prices under one plan: what `order` and `simulate` ask."""

from planner.ir import graph
from planner.ir import plan as plan_lib


class Priced:
  """As `planner.costs.cost.Cost`: the plan says where and how many rows."""

  def __init__(self, model, plan: plan_lib.Plan):
    """Takes a model, as `planner.search.exact.Model`, and a plan."""
    self._model, self._places, self._rows = model, plan.places, plan.micro_batch

  def seconds(self, flow: graph.Flow, node: graph.Node, place: str) -> float:
    """Of a call of a node there, so many rows at a time as is planned."""
    rows = None if graph.is_plumbing(node) else self._rows.get(node.name)
    return self._model.seconds(flow, node, self._places[place], rows)

  def transfer(
    self, flow: graph.Flow, value: int, source: str, target: str
  ) -> float:
    """Between a value's leaving a place and its being at another."""
    if source == target:
      return 0.0
    places = self._places
    return self._model.transfer(flow, value, places[source], places[target])

  def switch(self, flow: graph.Flow, value: int, place: str) -> float:
    """Of a value between the memory of a place's devices and of their host."""
    return self._model.switch(flow, value, self._places[place])

  def crowding(
    self, node: graph.Node, place: str, beside: tuple[str, ...]
  ) -> float:
    """How many times as long a call takes while those places work, too."""
    here, *others = (len(self._places[x].devices) for x in (place, *beside))
    return self._model.crowding(node.name, here, sum(others))
