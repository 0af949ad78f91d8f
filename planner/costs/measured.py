"""Numbers tagged with their origin, and tables of measured numbers."""

import bisect
from collections.abc import Mapping
import dataclasses
from typing import Literal, NamedTuple

Tag = Literal['measured', 'modeled', 'assumed']
HOST_MOVES = 'host_moves'  # In place of a stage: moves to and from host memory.


class Estimate(NamedTuple):
  """A number and its origin.

  Attributes:
    value: the number, in seconds, bytes or as a factor.
    tag: 'measured' on these devices, 'modeled' from known rates and sizes, or
      'assumed' without evidence.
  """

  value: float
  tag: Tag


@dataclasses.dataclass(frozen=True)
class RowCurve:
  """Seconds of a call by its rows, measured at three or more numbers of rows.

  It is interpolated linearly and never extrapolated.
  """

  points: tuple[tuple[int, float], ...]

  def __post_init__(self):
    points = tuple(sorted((int(n), float(s)) for n, s in self.points))
    object.__setattr__(self, 'points', points)
    rows = [n for n, _ in points]
    if len(set(rows)) < 3 or len(set(rows)) < len(rows):
      raise ValueError(
        f'A curve needs three numbers of rows or more, each once; got {rows}: '
        'two points cannot show a bend.'
      )

  def at(self, rows: float) -> float | None:
    """Returns the seconds at `rows`; None outside the measured range."""
    known = [n for n, _ in self.points]
    if not known[0] <= rows <= known[-1]:
      return None
    i = max(1, bisect.bisect_left(known, rows))
    (n, s), (m, t) = self.points[i - 1], self.points[i]
    return s + (t - s) * (rows - n) / (m - n)

  def nearest(self, rows: float) -> tuple[float, float]:
    """Returns the nearest measured number of rows, and its seconds."""
    rows = min(max(rows, self.points[0][0]), self.points[-1][0])
    return rows, self.at(rows)


# Stage, devices and mesh axes.
Key = tuple[str, int, tuple[tuple[str, int], ...]]


@dataclasses.dataclass(frozen=True)
class Measurements:
  """Measured seconds by stage, number of devices and mesh axes.

  Rows are those of one micro-batch, over all devices.

  Attributes:
    curves: seconds of a call by its rows.
    constants: seconds of a call that do not depend on its rows.
    turns: seconds of one of several micro-batches of a call, by its rows. They
      share one launch and one output.
    factors: by stage, the seconds in a run over the seconds above or the
      modeled seconds; those of `HOST_MOVES`, too.
    contention: by stage, how many times as long a call takes while every core
      of a shared processor runs one.
    host_rows: by host stage, the seconds of a row, without a run and on a
      processor that need not be the one of the run.
    answers: seconds that others, such as tools, took to answer a row.
  """

  curves: Mapping[Key, RowCurve] = dataclasses.field(default_factory=dict)
  constants: Mapping[Key, float] = dataclasses.field(default_factory=dict)
  turns: Mapping[Key, RowCurve] = dataclasses.field(default_factory=dict)
  factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
  contention: Mapping[str, float] = dataclasses.field(default_factory=dict)
  host_rows: Mapping[str, float] = dataclasses.field(default_factory=dict)
  answers: tuple[float, ...] = ()

  def times(self, factors: Mapping[str, float]) -> 'Measurements':
    """Multiplies the factors, after a run took so many times as long."""
    known = {
      name: self.factors.get(name, 1.0) * factor
      for name, factor in factors.items()
    }
    return dataclasses.replace(self, factors={**self.factors, **known})

  def curve(self, key: Key, turns: float = 1) -> RowCurve | None:
    """Returns the seconds of each of `turns` micro-batches, by their rows."""
    curve = self.curves.get(key)
    return self.turns.get(key, curve) if turns > 1 else curve

  def rows(self, stage: str) -> list[int]:
    """Returns the numbers of rows at which a stage was measured."""
    curves = (curve for key, curve in self.curves.items() if key[0] == stage)
    return sorted({rows for curve in curves for rows, _ in curve.points})

  def elsewhere(self, stage: str) -> Key | None:
    """Returns where else a stage was measured, on the fewest devices."""
    known = (*self.curves, *self.constants)
    there = [key for key in known if key[0] == stage]
    return min(there, key=lambda key: key[1], default=None)
