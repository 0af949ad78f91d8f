"""The costs of a model under one plan."""

from planner.ir import graph
from planner.ir import plan as plan_lib


class CostTable:
  """Implements `cost.Cost`: the plan sets placements and micro-batches."""

  def __init__(self, model, plan: plan_lib.Plan):
    """Takes a `cost_model.Model` and a plan."""
    self._model, self._places, self._plan = model, plan.places, plan

  def seconds(self, flow: graph.Flow, node: graph.Node, place: str) -> float:
    """Returns the time of a call of a node in the planned micro-batches."""
    where = flow, node, self._places[place]
    if graph.is_plumbing(node):
      return self._model.seconds(*where, None)
    return self._model.seconds(*where, *self._plan.execution(node.name))

  def transfer(
    self, flow: graph.Flow, value: int, source: str, target: str
  ) -> float:
    """Returns the time of moving a value from place to place."""
    if source == target:
      return 0.0
    places = self._places
    return self._model.transfer(flow, value, places[source], places[target])

  def switch(self, flow: graph.Flow, value: int, place: str) -> float:
    """Returns the time of moving a value between device and host memory."""
    return self._model.switch(flow, value, self._places[place])

  def contention(
    self, node: graph.Node, place: str, beside: tuple[str, ...]
  ) -> float:
    """Returns how many times as long a call takes while others run."""
    here, *others = (len(self._places[x].devices) for x in (place, *beside))
    return self._model.contention(node.name, here, sum(others))
