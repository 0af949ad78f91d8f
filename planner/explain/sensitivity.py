"""Finds the costs that would change the choice of plan if they were wrong.

One cost at a time is made a tenth larger or smaller: the seconds of a stage, of
all transfers between places, of all moves to and from host memory. Seconds that
are assumed without evidence are made ten times larger or smaller. Then the
known plans are evaluated again, and the space is searched for a faster one.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from planner.costs import scaled
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import exact
from planner.search import result as result_lib
from planner.simulation import evaluate_plan

FACTORS = (1.1, 0.9)
ASSUMED_FACTORS = (10.0, 0.1)  # Of what nothing is known about.
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
  def is_guess(self) -> bool:
    """Whether the cost is assumed, so that the choice hangs on a guess."""
    return self.factor in ASSUMED_FACTORS

  @property
  def gain(self) -> float:
    """The fraction of a step that changing the plan would save."""
    return 1 - self.seconds / self.before if self.before else 0.0


def sensitivity(
  flow,
  model,
  found: result_lib.SearchResult,
  known: Sequence[plan_lib.Plan] = (),
  *,
  staleness: int = 0,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
  assumed: Collection[str] = (),
) -> list[Change]:
  """Changes each cost up and down, those that are assumed by more.

  Args:
    flow: as recorded.
    model: the cost model.
    found: the result of a search with this model.
    known: other plans of the space that fit in memory.
    staleness: as in that search.
    deadline: of all searches together. `proved` is false where a search was
      stopped by it.
    assumed: stages whose seconds are assumed.

  Returns:
    Every change, whether or not it changes the choice; without those that
    there was no time for.
  """
  changes = all_changes(flow, found, assumed)
  plans = [found.best] + [
    plan
    for plan in [*(plan for plan, _ in found.ranked), *known]
    if plan != found.best
  ]
  out = []
  for i, (cost, factor) in enumerate(changes):
    other = changed(model, cost, factor)
    left = deadline.part(1 / (len(changes) - i))
    try:
      if factor > 1 and _same(flow, other, found, staleness, deadline):
        seconds = found.seconds
        out.append(Change(cost, factor, seconds, None, seconds, True))
      else:
        fields = _choose(flow, other, found, plans, staleness, (deadline, left))
        out.append(Change(cost, factor, *fields))
    except deadline_lib.TimeUp:
      break
  return out


def all_changes(
  flow, found: result_lib.SearchResult, assumed: Collection[str] = ()
) -> list[tuple[str, float]]:
  """Lists the changes to ask about, as costs and factors."""
  takes_turns = found.best is not None and found.best.shared_devices
  costs = list(flow.stages)
  costs += [MOVES] * (found.space.devices > 1)
  costs += [SWITCHES] * bool(found.space.offload or takes_turns)
  return [
    (cost, factor)
    for cost in costs
    for factor in (ASSUMED_FACTORS if cost in assumed else FACTORS)
  ]


def changed(model, cost: str, factor: float) -> scaled.ScaledCosts:
  """Returns the model with one cost multiplied by a factor."""
  if cost == MOVES:
    return scaled.ScaledCosts(model, transfers=factor)
  if cost == SWITCHES:
    return scaled.ScaledCosts(model, switches=factor)
  return scaled.ScaledCosts(model, {cost: factor})


def _same(flow, dearer, found, staleness: int, deadline) -> bool:
  """Whether a larger cost keeps the choice, without a search.

  It does if the chosen plan is proved the fastest and does not become slower:
  no plan becomes faster when a cost grows.
  """
  if found.gap != 0 or found.simulated > len(found.ranked):
    return False
  enough = found.seconds * (1 + exact.ROUNDING)
  if _timed(flow, dearer, found.best, staleness, deadline) > enough:
    return False
  return all(
    _timed(flow, dearer, plan, staleness, deadline)
    >= found.seconds * (1 - MATTERS)
    for plan, _ in found.ranked[1:]
  )


def _timed(flow, model, plan, staleness, deadline) -> float:
  """Simulates a plan, if there is time; returns the seconds of a step."""
  deadline.check()
  return evaluate_plan.evaluate(flow, model, plan, staleness).seconds


def _choose(flow, model, found, plans, staleness, deadlines):
  """Returns the fastest plan with a changed model, as fields of a `Change`.

  The deadlines are that of known plans, and that of the search for others.
  """
  deadline, of_search = deadlines
  timed = [_timed(flow, model, plan, staleness, deadline) for plan in plans]
  before, best = timed[0], min(timed)
  plan, enough = None, before * (1 - MATTERS)
  if best < enough:
    plan, enough = plans[timed.index(best)], best
  else:
    best = before
  other = exact.search(
    flow,
    model,
    found.space,
    staleness=staleness,
    keep=1,
    deadline=of_search,
    below=enough,
  )
  if other.best is not None and other.seconds < enough:
    plan, best = other.best, other.seconds
  return before, plan, best, other.gap == 0
