"""Tabulates the values that places hold, by the partition of stages."""

from collections.abc import Callable, Mapping, Sequence
import functools

from planner.ir import graph
from planner.lower import program, rounding
from planner.search import pieces


class Residence:
  """Tabulates the values of places, memoized by the partition of stages."""

  def __init__(
    self,
    flow: graph.Flow,
    stages: Callable[[int], Sequence[tuple[str, ...]]],
  ):
    """Takes a flow and its partitions.

    Args:
      flow: as recorded.
      stages: the stages of each place of a partition, by its index.
    """
    self._flow, self._stages = flow, stages
    self.held = functools.cache(self._held)
    self.homes = functools.cache(self._homes)

  def _held(self, part: int) -> list[Mapping[int, int]]:
    """Returns what each place holds rounded, as `rounding.held`."""
    apart = pieces.apart(self._stages(part))
    return [*rounding.held(self._flow, apart).values()]

  def _homes(self, part: int) -> list[frozenset[int]]:
    """Returns the carried values of each place, as it has them.

    What a place holds rounded stands for the value.
    """
    stages = self._stages(part)
    homes = program.homes(self._flow, pieces.apart(stages)).items()
    return [
      frozenset(rounded.get(v, v) for v, places in homes if first in places)
      for (first, *_), rounded in zip(stages, self.held(part), strict=True)
    ]
