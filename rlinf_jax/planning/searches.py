"""Searches for the fastest plan in several ways, for runs and for reports.

Both search exactly, and then give generation a second mesh where that is
faster. A report also has plans to compare with: those of Algorithm 1, and the
fastest of each number of places.
"""

from collections.abc import Callable
import dataclasses

from planner.ir import plan as plan_lib
from planner.search import algorithm1, exact, runners_up
from planner.search import deadline as deadline_lib
from planner.search import result as result_lib
from planner.search.plans import second_mesh
from planner.search.plans import space as space_lib
from rlinf_jax.planning import collector

KEPT = 25  # Fastest plans that a search returns.
SEARCH = 0.8  # Of the time that is left, for the fastest plan.
SHARE = 1 / 3  # Likewise for each of the next searches of a report.

Ranked = list[tuple[plan_lib.Plan, float]]


@collector.only_young()
def search(
  flow,
  model,
  staleness: int,
  deadline: deadline_lib.Deadline,
  allowed: Callable[[plan_lib.Plan], bool],
) -> result_lib.SearchResult:
  """Searches for the plan of a run.

  Args:
    flow: as recorded, without loops.
    model: the cost model.
    staleness: of the workflow, in steps.
    deadline: of the whole search.
    allowed: whether a plan with a second mesh may be chosen.
  """
  result = _exact(flow, model, staleness, deadline)
  result, _ = _second_mesh(
    flow, model, result, result.ranked, staleness, deadline, allowed
  )
  return result


@collector.only_young()
def compare(
  flow, model, staleness: int, deadline: deadline_lib.Deadline
) -> tuple[result_lib.SearchResult, Ranked, result_lib.SearchResult | None]:
  """Searches for the plan of a report, and for others to compare it with.

  Args:
    flow: as recorded, without loops.
    model: the cost model.
    staleness: of the workflow, in steps.
    deadline: of all searches, each of which has a part of the time, and of what
      comes after them.

  Returns:
    The result, plans from the fastest on, and the result of Algorithm 1, which
    is None if it is not known.
  """
  result = _exact(flow, model, staleness, deadline)
  ranked = []
  if result.best or result.gap:
    ranked = runners_up.runners_up(
      flow, model, result, staleness=staleness, deadline=deadline.part(SHARE)
    )
    result = runners_up.best_of(result, ranked)
  theirs = _algorithm1(flow, model, result, staleness, deadline)
  result, ranked = _adopt(result, ranked, theirs)
  result, ranked = _second_mesh(
    flow, model, result, ranked, staleness, deadline.part(SHARE)
  )
  return result, ranked, theirs


def _exact(flow, model, staleness, deadline) -> result_lib.SearchResult:
  return exact.search(
    flow,
    model,
    space_lib.default_space(flow, model),
    staleness=staleness,
    keep=KEPT,
    deadline=deadline.part(SEARCH),
  )


def _algorithm1(flow, model, result, staleness, deadline):
  """Returns the result of Algorithm 1; None if it is not known.

  It is not asked for where it is proved that no plan fits.
  """
  if result.best is None and result.proved:
    return None
  try:
    return algorithm1.algorithm1(
      flow,
      model,
      result.space,
      staleness=staleness,
      deadline=deadline.part(SHARE),
    )
  except deadline_lib.TimeUp:
    return None


def _adopt(result, ranked, theirs):
  """Takes over the plan of Algorithm 1 if a stopped search missed it.

  Returns:
    The result of the search, and plans from the fastest on.
  """
  if result.proved or not theirs or theirs.best is None:
    return result, ranked
  if theirs.best in [plan for plan, _ in ranked]:
    return result, ranked
  # As in a search, a step takes at least as long as is proved.
  found = theirs.best, max(theirs.seconds, result.bound)
  ranked = sorted([*ranked, found], key=lambda pair: pair[1])
  return runners_up.best_of(result, ranked), ranked


def _second_mesh(
  flow, model, result, ranked, staleness, deadline, allowed=lambda _: True
):
  """Takes over a plan in which two meshes take turns, if it is faster.

  Such plans are outside of the searched space, of which all else holds that the
  result says.

  Returns:
    The result, and plans from the fastest on.
  """
  found = second_mesh.fastest(
    flow,
    model,
    result.space,
    ranked,
    staleness=staleness,
    deadline=deadline,
    allowed=allowed,
  )
  if not found:
    return result, ranked
  plan, seconds = found
  ranked = [found, *ranked]
  return dataclasses.replace(
    result,
    best=plan,
    seconds=seconds,
    gap=max(0.0, 1 - result.bound / seconds),
    ranked=ranked,
  ), ranked
