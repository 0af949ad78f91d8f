"""How much longer each stage could take before a step does."""

from planner.explain import overview
from planner.ir import graph
from planner.simulation import evaluate_plan, simulate

GROWS = 1 + 1e-9  # Times as long: sums of the same seconds differ by less.
NOTHING = 1e-7  # Of a step: it is not told apart from no slack.
CLOSE = 1e-4  # Of the room there is: where a slope is measured.


class _Longer:
  """Costs of which each call of a stage takes some seconds more."""

  def __init__(self, cost, stage: str, more: float):
    self._cost, self._stage, self._more = cost, stage, more
    self.transfer, self.switch = cost.transfer, cost.switch
    self.contention = cost.contention

  def seconds(self, flow, node, place):
    found = self._cost.seconds(flow, node, place)
    mine = node.name == self._stage and not graph.is_plumbing(node)
    return found + self._more * mine


def slack(evaluation: evaluate_plan.PlanEvaluation) -> dict[str, float]:
  """Seconds more that each stage could take in a step, all of its calls.

  Programs stay as they are, and no stage but the one takes longer. A stage of
  which every moment counts has none.
  """
  return {stage: _of(evaluation, stage) for stage in evaluation.flow.stages}


def _of(evaluation: evaluate_plan.PlanEvaluation, stage: str) -> float:
  """The last seconds at which a step takes no longer.

  How long a step takes is a convex line of pieces, flat and then rising: from
  where it rises, go down along its slope until it is flat.
  """
  calls = sum(
    span.step == 0 and overview.stage_of(evaluation.flow, span) == stage
    for span in evaluation.simulation.spans
  )
  flat = evaluation.seconds

  def seconds(more):
    cost = _Longer(evaluation.cost, stage, more / calls)
    return evaluate_plan.re_evaluate(evaluation, cost).seconds

  place = evaluation.plan.stages[stage]
  if any(
    node.asynchronous and node.name == stage for node in evaluation.flow.nodes
  ):
    place = simulate.background(place, stage)
  room = at = flat - evaluation.busy.get(place, 0.0)  # Its place has no more.
  if at <= 0 or not calls:
    return 0.0
  grown = seconds(at)
  while grown > flat * GROWS and at > NOTHING * flat:
    step = min(room * CLOSE, at)
    slope = (grown - seconds(at - step)) / step
    down = (grown - flat) / slope if slope > 0 else at / 2
    at = max(0.0, at - max(down, NOTHING * flat))
    grown = seconds(at)
  return at if at > NOTHING * flat else 0.0
