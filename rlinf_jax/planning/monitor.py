"""Compares the steps of a run with the plan's prediction, and plans again.

Where the two deviate, the cost model is corrected by the measured seconds and
the search is repeated with the corrected model.
"""

from collections.abc import Callable, Mapping
import statistics
from typing import Any

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import passes, unroll
from rlinf_jax.planning import autoplan

ACCURATE = 0.8, 1.25  # Measured over predicted seconds that need no correction.
WINDOW = 8  # Steps over which medians are taken.
GAIN = 0.95  # Of the current seconds: a plan below it is worth the move.

# Builds the runtime of a plan, such as a `runtime.local.LocalRuntime`.
MakeRuntime = Callable[[plan_lib.Plan], Any]


class PlanMonitor:
  """Compares measured steps with the plan's prediction.

  Attributes:
    chosen: the current plan and its current prediction.
  """

  def __init__(
    self,
    flows: tuple[graph.Flow, graph.Flow],
    staleness: int,
    chosen: autoplan.ChosenPlan,
    make_runtime: MakeRuntime,
  ):
    """Starts with a plan.

    Args:
      flows: recordings of a step and of an evaluation.
      staleness: the workflow's staleness, in steps.
      chosen: the plan.
      make_runtime: builds the runtime of a plan.
    """
    self._flows, self._staleness = flows, staleness
    self._make_runtime = make_runtime
    self.chosen = chosen
    self._recent: list[tuple[float, Mapping[str, float]]] = []
    self._first = True  # The first step compiles, and does not count.
    # Measured over predicted seconds that no stage's seconds explain.
    self._unexplained = 1.0

  def runtime(self, timeline=None):
    """Builds the runtime of the current plan, which has no state yet."""
    chosen = self.chosen
    # Every process runs stages in the order that the costs predict with.
    runtime = self._make_runtime(
      passes.with_order(self._flows[0], chosen.plan, chosen.cost)
    )
    runtime.timeline = timeline or runtime.timeline
    return runtime

  def summary(self) -> str:
    """Describes the current plan in one line."""
    return autoplan.summary(self._flows[0], self.chosen)

  def update(
    self, step: float, by_stage: Mapping[str, float]
  ) -> autoplan.ChosenPlan | None:
    """Records a step, and returns a better plan once there is one.

    Args:
      step: seconds of the step.
      by_stage: seconds of each of its stages.
    """
    if self._first:
      self._first = False
      return None
    self._recent = [*self._recent, (step, by_stage)][-WINDOW:]
    if len(self._recent) < WINDOW:
      return None
    measured = statistics.median(step for step, _ in self._recent)
    predicted = self.chosen.prediction.step
    if _accurate(measured / predicted / self._unexplained):
      return None
    factors = self._factors()
    self._recent.clear()
    better = None
    if not all(map(_accurate, factors.values())):
      better = self._plan_again(factors)
    # Another search would not explain this ratio either.
    predicted = self.chosen.prediction.step
    self._unexplained = 1.0 if better else measured / predicted
    return better

  def _plan_again(self, factors) -> autoplan.ChosenPlan | None:
    """Corrects the cost model by the measured seconds, and searches again."""
    old = self.chosen
    model = old.model.with_measurements(old.model.measured.times(factors))
    step, evaluate = map(unroll.unroll, self._flows)
    current = autoplan.predict_step(step, self._staleness, model, old.plan)
    try:
      best = autoplan.search(step, evaluate, self._staleness, model)
    except autoplan.NoPlanError:
      gap = 1.0  # The plan runs, although it does not fit as modeled.
    else:
      if best.prediction.step < GAIN * current.step:
        self.chosen, self._first = best, True
        return best
      fastest = (1 - best.gap) * best.prediction.step
      gap = max(0.0, 1 - fastest / current.step)
    self.chosen = autoplan.ChosenPlan(old.plan, model, current, gap)
    return None

  def _factors(self) -> dict[str, float]:
    """Returns each stage's measured over predicted seconds."""
    factors = {}
    for name, predicted in self.chosen.prediction.stages.items():
      seconds = [by_stage.get(name, 0.0) for _, by_stage in self._recent]
      median = statistics.median(seconds)
      if predicted.value > 0 and median > 0:
        factors[name] = median / predicted.value
    return factors


def _accurate(ratio: float) -> bool:
  """Whether measured over predicted seconds need no correction."""
  low, high = ACCURATE
  return low <= ratio <= high
