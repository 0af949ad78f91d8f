"""Numbers that say where they come from, and tables of measured ones."""

import bisect
from collections.abc import Mapping
import dataclasses
from typing import Literal, NamedTuple

Tag = Literal['measured', 'modeled', 'assumed']


class Estimate(NamedTuple):
  """A number and where it comes from.

  Attributes:
    value: in the unit of what it is a part of.
    tag: 'measured' on these devices, 'modeled' from what is known of them, or
      'assumed' for want of anything better.
  """

  value: float
  tag: Tag


@dataclasses.dataclass(frozen=True)
class RowCurve:
  """Seconds of a call by its rows, measured at three numbers of rows or more.

  Between them it is a straight line; beyond them it says nothing.
  """

  points: tuple[tuple[int, float], ...]

  def __post_init__(self):
    points = tuple(sorted((int(n), float(s)) for n, s in self.points))
    object.__setattr__(self, 'points', points)
    rows = [n for n, _ in points]
    if len(set(rows)) < 3 or len(set(rows)) < len(rows):
      raise ValueError(
        f'A curve needs three numbers of rows or more, each once; got {rows}: '
        'two points cannot show that they are not on a line.'
      )

  def at(self, rows: float) -> float | None:
    """Seconds; None outside what was measured."""
    known = [n for n, _ in self.points]
    if not known[0] <= rows <= known[-1]:
      return None
    i = max(1, bisect.bisect_left(known, rows))
    (n, s), (m, t) = self.points[i - 1], self.points[i]
    return s + (t - s) * (rows - n) / (m - n)

  def nearest(self, rows: float) -> tuple[float, float]:
    """Rows and seconds, as near to `rows` as was measured."""
    rows = min(max(rows, self.points[0][0]), self.points[-1][0])
    return rows, self.at(rows)


# Stage, devices and mesh axes.
Key = tuple[str, int, tuple[tuple[str, int], ...]]


@dataclasses.dataclass(frozen=True)
class Measurements:
  """What was measured, by stage, number of devices and mesh axes.

  Rows are those of one micro-batch, all devices together.

  Attributes:
    curves: seconds of a call by its rows.
    constants: seconds of a call, whatever its rows.
    turns: seconds of one of several micro-batches of a call, by its rows: the
      call begins but once, and what they add up is handed out once.
    factors: by stage, how many times the seconds above, or modeled, a run has
      taken.
    contention: by stage, how many times as long a call takes while every core
      of a shared processor runs one.
  """

  curves: Mapping[Key, RowCurve] = dataclasses.field(default_factory=dict)
  constants: Mapping[Key, float] = dataclasses.field(default_factory=dict)
  turns: Mapping[Key, RowCurve] = dataclasses.field(default_factory=dict)
  factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
  contention: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def times(self, factors: Mapping[str, float]) -> 'Measurements':
    """The same, after a run took so many times as long."""
    known = {
      name: self.factors.get(name, 1.0) * factor
      for name, factor in factors.items()
    }
    return dataclasses.replace(self, factors={**self.factors, **known})

  def curve(self, key: Key, turns: float = 1) -> RowCurve | None:
    """Seconds of each of so many micro-batches of a call, by their rows."""
    curve = self.curves.get(key)
    return self.turns.get(key, curve) if turns > 1 else curve

  def rows(self, stage: str) -> list[int]:
    """The numbers of rows at which a stage was measured."""
    curves = (curve for key, curve in self.curves.items() if key[0] == stage)
    return sorted({rows for curve in curves for rows, _ in curve.points})

  def elsewhere(self, stage: str) -> Key | None:
    """Where else a stage was measured: on the fewest devices."""
    known = (*self.curves, *self.constants)
    there = [key for key in known if key[0] == stage]
    return min(there, key=lambda key: key[1], default=None)
