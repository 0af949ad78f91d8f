"""Finds how much longer each stage could take without delaying a step."""

from planner.explain import overview
from planner.ir import graph
from planner.search import deadline as deadline_lib
from planner.simulation import evaluate_plan, simulate

GROWS = 1 + 1e-9  # Ratio: sums of the same seconds differ by less.
NOTHING = 1e-7  # Of a step: a smaller slack counts as none.
CLOSE = 1e-4  # Of the largest slack: the step of a numerical slope.


class _Longer:
  """Adds some seconds to each call of a stage."""

  def __init__(self, cost, stage: str, more: float):
    self._cost, self._stage, self._more = cost, stage, more
    self.transfer, self.switch = cost.transfer, cost.switch
    self.contention = cost.contention

  def seconds(self, flow, node, place):
    found = self._cost.seconds(flow, node, place)
    mine = node.name == self._stage and not graph.is_plumbing(node)
    return found + self._more * mine


def slack(
  evaluation: evaluate_plan.PlanEvaluation,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
) -> dict[str, float | None]:
  """Returns the slack of each stage, in seconds over all calls of a step.

  Programs stay as they are, and only one stage takes longer at a time. A stage
  on the critical path has no slack. After the deadline, the slack of the other
  stages is unknown: None.
  """
  stages = evaluation.flow.stages
  return {
    stage: None if deadline.has_passed else _of(evaluation, stage)
    for stage in stages
  }


def _of(evaluation: evaluate_plan.PlanEvaluation, stage: str) -> float:
  """Returns the largest extra seconds of a stage that do not delay a step.

  The time of a step is a convex, piecewise linear function of these seconds,
  first flat and then rising. Newton's method goes down its slope until flat.
  Where places share devices or cores, the function may have other shapes. Then
  the result delays no step, but may not be the largest.
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
  room = at = flat - evaluation.busy.get(
    place, 0.0
  )  # Its place is idle for no longer.
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
