"""Finds the costs that would change the choice of plan if they were wrong.

One cost at a time is made a tenth larger or smaller: the seconds of a stage, of
all transfers between places, of all moves to and from host memory. Then the
known plans are evaluated again, and the space is searched for a faster one.
"""

from collections.abc import Sequence
import time
from typing import NamedTuple

from planner.costs import scaled
from planner.ir import plan as plan_lib
from planner.search import exact
from planner.simulation import evaluate_plan

FACTORS = (1.1, 0.9)
MATTERS = 1e-3  # Of a step: a smaller gain does not count as a change.
MOVES, SWITCHES = 'moves between places', 'moves to host memory'


class Change(NamedTuple):
  """The effect of one cost being larger or smaller.

  Attributes:
    cost: name of a stage, `MOVES` or `SWITCHES`.
    factor: the number that this cost is multiplied by.
    before: seconds of a step of the chosen plan with the changed cost.
    plan: a plan that is faster with the changed cost; None if none is known.
    seconds: seconds of a step of the fastest plan with the changed cost.
    proved: whether it is proved that no plan of the space is faster; else
      `seconds` is the minimum over the plans that were evaluated.
  """

  cost: str
  factor: float
  before: float
  plan: plan_lib.Plan | None
  seconds: float
  proved: bool

  @property
  def gain(self) -> float:
    """The fraction of a step that changing the plan would save."""
    return 1 - self.seconds / self.before if self.before else 0.0


def sensitivity(
  flow,
  model,
  found: exact.SearchResult,
  known: Sequence[plan_lib.Plan] = (),
  *,
  staleness: int = 0,
  seconds: float = 30.0,
) -> list[Change]:
  """Changes each cost by a tenth, up and down.

  Args:
    flow: as recorded.
    model: the cost model.
    found: the result of a search with this model.
    known: other plans of the space that fit in memory.
    staleness: as in that search.
    seconds: limit of all searches together. `proved` is false where a search
      was stopped by it.

  Returns:
    Every change, whether or not it changes the choice.
  """
  costs = list(flow.stages)
  costs += [MOVES] * (found.space.devices > 1)
  costs += [SWITCHES] * bool(found.space.offload)
  changes = [(cost, factor) for cost in costs for factor in FACTORS]
  plans = [found.best] + [
    plan
    for plan in [*(plan for plan, _ in found.ranked), *known]
    if plan != found.best
  ]
  out, deadline = [], time.monotonic() + seconds
  for i, (cost, factor) in enumerate(changes):
    left = max(0.0, deadline - time.monotonic()) / (len(changes) - i)
    other = changed(model, cost, factor)
    out.append(
      Change(cost, factor, *_choose(flow, other, found, plans, staleness, left))
      if factor < 1 or not _same(flow, other, found, staleness)
      else Change(cost, factor, found.seconds, None, found.seconds, True)
    )
  return out


def changed(model, cost: str, factor: float) -> scaled.ScaledCosts:
  """Returns the model with one cost multiplied by a factor."""
  if cost == MOVES:
    return scaled.ScaledCosts(model, transfers=factor)
  if cost == SWITCHES:
    return scaled.ScaledCosts(model, switches=factor)
  return scaled.ScaledCosts(model, {cost: factor})


def _same(flow, dearer, found: exact.SearchResult, staleness: int) -> bool:
  """Whether a larger cost keeps the choice, without a search.

  It does if the chosen plan is proved the fastest and does not become slower:
  no plan becomes faster when a cost grows.
  """
  if found.gap != 0 or found.simulated > len(found.ranked):
    return False
  seconds = lambda plan: (
    evaluate_plan.evaluate(flow, dearer, plan, staleness).seconds
  )
  enough = found.seconds * (1 + exact.ROUNDING)
  if seconds(found.best) > enough:
    return False
  return all(
    seconds(plan) >= found.seconds * (1 - MATTERS)
    for plan, _ in found.ranked[1:]
  )


def _choose(flow, model, found, plans, staleness, seconds):
  """Returns the fastest plan with a changed model, as fields of a `Change`."""
  timed = [
    evaluate_plan.evaluate(flow, model, plan, staleness).seconds
    for plan in plans
  ]
  before, best = timed[0], min(timed)
  plan, enough = None, before * (1 - MATTERS)
  if best < enough:
    plan, enough = plans[timed.index(best)], best
  else:
    best = before
  if not seconds:
    return before, plan, best, False
  other = exact.search(
    flow,
    model,
    found.space,
    staleness=staleness,
    keep=1,
    seconds=seconds,
    below=enough,
  )
  if other.best is not None and other.seconds < enough:
    plan, best = other.best, other.seconds
  return before, plan, best, other.gap == 0
