"""Plans that are worth a comparison with the fastest."""

import dataclasses
import time

from planner.ir import plan as plan_lib
from planner.search import exact


def runners_up(
  flow, model, found: exact.Found, *, ahead: int = 0, seconds: float = 10.0
) -> list[tuple[plan_lib.Plan, float]]:
  """The fastest plans that were timed, with the best of each number of places.

  A search times only what might be the fastest. So that what it has ruled out
  can be compared, the fastest plan of each number of places is searched for.

  Args:
    flow: as recorded.
    model: of the costs.
    found: what a search has found.
    ahead: as in that search.
    seconds: to search at most, all in all.

  Returns:
    Plans and the seconds of their steps, fastest first.
  """
  ranked = list(found.ranked)
  deadline = time.monotonic() + seconds
  most = min(found.space.places, len(flow.stages), found.space.devices)
  for places in range(found.space.fewest, most + 1):
    if any(len(plan.places) == places for plan, _ in found.ranked[:1]):
      continue
    space = dataclasses.replace(found.space, places=places, fewest=places)
    left = max(0.0, deadline - time.monotonic()) / (most + 1 - places)
    some = exact.search(
      flow, model, space, ahead=ahead, keep=1, seconds=left
    ).ranked
    known = [plan for plan, _ in ranked]
    ranked += [entry for entry in some if entry[0] not in known]
  return sorted(ranked, key=lambda entry: entry[1])


def best_of(
  found: exact.Found, ranked: list[tuple[plan_lib.Plan, float]]
) -> exact.Found:
  """What a search that was stopped has found, if a runner-up is faster."""
  if not ranked or ranked[0][1] >= found.seconds:
    return found
  plan, seconds = ranked[0]
  gap = 1 - found.bound / seconds
  return dataclasses.replace(
    found, best=plan, seconds=seconds, gap=gap, ranked=ranked
  )
