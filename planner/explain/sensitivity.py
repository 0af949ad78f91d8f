"""Which cost would have to be wrong, and by how little, to change the choice.

One number at a time is made a tenth larger or smaller: the seconds of a stage,
all moves between places, all moves to and from host memory. Then the plans that
are known are timed again, and the space is searched for a faster one.
"""

from collections.abc import Sequence
import time
from typing import NamedTuple

from planner.costs import scaled
from planner.ir import plan as plan_lib
from planner.search import exact
from planner.simulation import evaluate_plan

TIMES = (1.1, 0.9)
MATTERS = 1e-3  # Of a step: a plan that gains less is not another choice.
MOVES, SWITCHES = 'moves between places', 'moves to host memory'


class Change(NamedTuple):
  """One cost that is larger or smaller than was thought, and what follows.

  Attributes:
    cost: the stage whose seconds they are, `MOVES` or `SWITCHES`.
    times: the factor.
    before: seconds of a step of the plan that was chosen, as it costs then.
    plan: the one that is faster then; None if none is known.
    seconds: of a step of the plan that is the fastest then.
    proved: whether no plan of the space is faster than that by what matters;
      else it is the fastest of those that were timed.
  """

  cost: str
  times: float
  before: float
  plan: plan_lib.Plan | None
  seconds: float
  proved: bool

  @property
  def gain(self) -> float:
    """What a change of plan would gain, of a step."""
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
    model: of the costs.
    found: what a search by this model has found.
    known: other plans of the space that fit in memory, to be timed again.
    staleness: as in that search.
    seconds: to search at most, all in all. Where the time is up before a
      search has come to its end, `proved` is false.

  Returns:
    Every change, whether or not it changes the choice.
  """
  costs = list(flow.stages)
  costs += [MOVES] * (found.space.devices > 1)
  costs += [SWITCHES] * bool(found.space.offload)
  changes = [(cost, times) for cost in costs for times in TIMES]
  plans = [found.best] + [
    plan
    for plan in [*(plan for plan, _ in found.ranked), *known]
    if plan != found.best
  ]
  out, deadline = [], time.monotonic() + seconds
  for i, (cost, times) in enumerate(changes):
    left = max(0.0, deadline - time.monotonic()) / (len(changes) - i)
    other = changed(model, cost, times)
    out.append(
      Change(cost, times, *_choose(flow, other, found, plans, staleness, left))
      if times < 1 or not _same(flow, other, found, staleness)
      else Change(cost, times, found.seconds, None, found.seconds, True)
    )
  return out


def changed(model, cost: str, times: float) -> scaled.ScaledCosts:
  """A model of which one cost is so many times as large."""
  if cost == MOVES:
    return scaled.ScaledCosts(model, transfers=times)
  if cost == SWITCHES:
    return scaled.ScaledCosts(model, switches=times)
  return scaled.ScaledCosts(model, {cost: times})


def _same(flow, dearer, found: exact.SearchResult, staleness: int) -> bool:
  """Whether a cost that grows leaves the choice alone without a search.

  It does if the chosen plan takes no longer and is proved: what no plan could
  do in less time it cannot now that things cost more.
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
  """The fastest plan if a model is right: fields of a `Change`."""
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
