"""The costs of a model under one plan."""

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import rounding


class CostTable:
  """Implements `cost.Cost`: the plan sets placements and micro-batches."""

  def __init__(self, model, plan: plan_lib.Plan):
    """Takes a `cost_model.Model` and a plan."""
    self._model, self._places, self._plan = model, plan.places, plan
    self._seconds, self._rounded = {}, {}

  def seconds(self, flow: graph.Flow, node: graph.Node, place: str) -> float:
    """Returns the time of a call of a node in the planned micro-batches."""
    key = id(node), place
    if key not in self._seconds:
      where = flow, node, self._places[place]
      execution = (None,)
      if not graph.is_plumbing(node):
        execution = self._plan.execution(node.name)
      found = self._model.seconds(*where, *execution)
      # With the node, so that no other node gets its id.
      self._seconds[key] = node, found
    return self._seconds[key][1]

  def transfer(
    self, flow: graph.Flow, value: int, source: str, target: str
  ) -> float:
    """Returns the time of moving a value from place to place."""
    if source == target:
      return 0.0
    places, value = self._places, self._held(flow, value, target)
    return self._model.transfer(flow, value, places[source], places[target])

  def switch(self, flow: graph.Flow, value: int, place: str) -> float:
    """Returns the time of moving a value between device and host memory."""
    value = self._held(flow, value, place)
    return self._model.switch(flow, value, self._places[place])

  def _held(self, flow, value: int, place: str) -> int:
    """Returns the value, or what it is rounded to at a place."""
    if not flow.rounded:
      return value
    key = id(flow.values)  # A flow whose nodes are reordered shares them.
    if key not in self._rounded:
      # With the flow, so that no other one gets its id.
      self._rounded[key] = flow, rounding.held(flow, self._plan)
    return self._rounded[key][1][place].get(value, value)

  def contention(
    self, node: graph.Node, place: str, beside: tuple[str, ...]
  ) -> float:
    """Returns how many times as long a call takes while others run."""
    here, *others = (len(self._places[x].devices) for x in (place, *beside))
    return self._model.contention(node.name, here, sum(others))
