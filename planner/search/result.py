"""The result of a search, whichever algorithm it was made by."""

import dataclasses

from planner.ir import plan as plan_lib
from planner.search.plans import space as space_lib


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """The result of a search.

  Attributes:
    best: the fastest plan; None if none fits in memory, or none is faster than
      the given limit.
    seconds: simulated time of a step of `best`. It is at least the plan's lower
      bound, as a few steps may not show yet which place falls behind.
    bound: lower bound on the time of a step of every plan of the space; None
      where the algorithm proves nothing.
    gap: by what fraction of `seconds` another plan might be faster; 0 is a
      proof that none is.
    ranked: the fastest simulated plans and their seconds. Only the rank of the
      first is proved.
    infeasible: plans that need too much memory, the nearest to fitting first,
      and the inequality that they violate.
    space: the plans that were searched.
    tried: number of plans and sets of plans that were bounded.
    simulated: number of plans that were simulated.
  """

  best: plan_lib.Plan | None
  seconds: float
  bound: float | None
  gap: float | None
  ranked: list[tuple[plan_lib.Plan, float]]
  infeasible: list[tuple[plan_lib.Plan, str]]
  space: space_lib.Space
  tried: int
  simulated: int

  @property
  def proved(self) -> bool:
    """Whether it is proved that no plan is faster, or that none fits."""
    return self.gap == 0
