"""Finds plans to compare with the fastest."""

import dataclasses

from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import exact
from planner.search import result as result_lib


def runners_up(
  flow,
  model,
  found: result_lib.SearchResult,
  *,
  staleness: int = 0,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
) -> list[tuple[plan_lib.Plan, float]]:
  """Adds the best plan of each number of places to the ranked plans.

  A search simulates only plans that might be the fastest. To compare the others
  as well, this searches for the fastest plan of each number of places.

  Args:
    flow: as recorded.
    model: of the costs.
    found: the result of a search.
    staleness: as in that search.
    deadline: of all these searches together.

  Returns:
    Plans and the seconds of their steps, fastest first.
  """
  ranked = list(found.ranked)
  most = min(found.space.max_places, len(flow.stages), found.space.devices)
  for places in range(found.space.min_places, most + 1):
    if any(len(plan.places) == places for plan, _ in found.ranked[:1]):
      continue
    space = dataclasses.replace(
      found.space, max_places=places, min_places=places
    )
    some = exact.search(
      flow,
      model,
      space,
      staleness=staleness,
      keep=1,
      deadline=deadline.part(1 / (most + 1 - places)),
    ).ranked
    known = [plan for plan, _ in ranked]
    ranked += [entry for entry in some if entry[0] not in known]
  return sorted(ranked, key=lambda entry: entry[1])


def best_of(
  found: result_lib.SearchResult, ranked: list[tuple[plan_lib.Plan, float]]
) -> result_lib.SearchResult:
  """Corrects a search that was stopped if another plan is faster.

  Args:
    found: the result of the search. What it proved is not doubted.
    ranked: plans and the seconds of their steps, fastest first.
  """
  if found.proved or not ranked or ranked[0][1] >= found.seconds:
    return found
  plan, seconds = ranked[0]
  gap = 1 - found.bound / seconds
  return dataclasses.replace(
    found, best=plan, seconds=seconds, gap=gap, ranked=ranked
  )
