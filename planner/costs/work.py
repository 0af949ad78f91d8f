"""What a call of a stage has to do, as plain data: arithmetic and traffic.

Counted by `count`, which needs JAX; read by models of costs, which do not.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Work:
  """Of one call, on one device that has all of it.

  Attributes:
    flops: arithmetic operations of any kind; a multiply-add is two.
    matmul: those of matrix products and convolutions, by type of the operands.
    bytes_in: arguments, each once.
    bytes_out: results, each once.
    bytes_moved: to and from device memory, if elementwise arithmetic is fused
      with what follows it and everything else reads and writes its operands.
    bytes_alive: most bytes of intermediate values alive at one time; arguments
      and results are not among them.
    kernels: things launched one after the other on the device.
    partial: products summed over a dimension of an argument, by that
      dimension's letter: how many, and the bytes of their results. Where
      devices share the letter, these are what they add up.
    turns: that were counted of a loop that may end before, as decoding does; 0
      if there is none, and of several the most.
  """

  flops: float = 0.0
  matmul: Mapping[str, float] = dataclasses.field(default_factory=dict)
  bytes_in: float = 0.0
  bytes_out: float = 0.0
  bytes_moved: float = 0.0
  bytes_alive: float = 0.0
  kernels: float = 0.0
  partial: Mapping[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )
  turns: float = 0.0

  @property
  def matmul_flops(self) -> float:
    return sum(self.matmul.values())

  @property
  def other_flops(self) -> float:
    """Elementwise arithmetic, reductions and the like."""
    return max(0.0, self.flops - self.matmul_flops)

  def weighted(self, n: float, other: 'Work', m: float) -> 'Work':
    """`n · self + m · other`, nothing below zero."""

    def mix(a, b):
      return max(0.0, n * a + m * b)

    scalars = {
      field: mix(getattr(self, field), getattr(other, field))
      for field in SCALARS
    }
    types = [*dict.fromkeys([*self.matmul, *other.matmul])]
    letters = [*dict.fromkeys([*self.partial, *other.partial])]
    return Work(
      **scalars,
      matmul={
        t: mix(self.matmul.get(t, 0.0), other.matmul.get(t, 0.0)) for t in types
      },
      partial={
        letter: tuple(
          mix(a, b)
          for a, b in zip(
            self.partial.get(letter, (0.0, 0.0)),
            other.partial.get(letter, (0.0, 0.0)),
            strict=True,
          )
        )
        for letter in letters
      },
      turns=max(self.turns, other.turns),
    )

  def __add__(self, other: 'Work') -> 'Work':
    return self.weighted(1.0, other, 1.0)

  def times(self, n: float) -> 'Work':
    return self.weighted(n, NONE, 0.0)

  def to_dict(self) -> dict:
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, plain: Mapping) -> 'Work':
    partial = {k: tuple(v) for k, v in plain.get('partial', {}).items()}
    return cls(**{**plain, 'partial': partial})


SCALARS = tuple(
  field.name
  for field in dataclasses.fields(Work)
  if field.name not in ('matmul', 'partial', 'turns')
)
NONE = Work()


@dataclasses.dataclass(frozen=True)
class StageWork:
  """The work of a stage, for any number of rows: straight lines.

  Attributes:
    fixed: what a call does whatever its rows, such as reading parameters.
    per_row: what it does for each row besides.
    rows: up to which this holds: the whole batch; 0 for a stage without rows.
    below: the same for fewer rows, the fewest first. A stage that makes its
      logits in chunks, for one, has fewer chunks then.
  """

  fixed: Work
  per_row: Work = NONE
  rows: int = 0
  below: tuple['StageWork', ...] = ()

  def near(self, rows: float) -> 'StageWork':
    """The line that holds for so many rows."""
    return next((call for call in self.below if rows <= call.rows), self)

  def at(self, rows: float) -> Work:
    """Of a call with so many rows."""
    line = self.near(rows)
    return line.fixed.weighted(1.0, line.per_row, rows)

  @property
  def full_batch(self) -> Work:
    """Of a call with the whole batch."""
    return self.at(self.rows)

  def to_dict(self) -> dict:
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, plain: Mapping) -> 'StageWork':
    return cls(
      Work.from_dict(plain['fixed']),
      Work.from_dict(plain['each']),
      plain['rows'],
      tuple(map(cls.from_dict, plain['below'])),
    )


def piecewise_linear(points: Sequence[tuple[int, Work]]) -> StageWork:
  """The lines through the work of calls of some numbers of rows.

  Args:
    points: rows and their work, the fewest first; of one alone, all is fixed.
  """
  rows = [n for n, _ in points]
  if not rows or rows != sorted(set(rows)):
    raise ValueError(f'Lines need numbers of rows that rise: got {rows}.')
  if len(points) == 1:
    return StageWork(points[0][1], rows=rows[0])
  lines = []
  for (n, one), (m, other) in itertools.pairwise(points):
    each = other.weighted(1 / (m - n), one, -1 / (m - n))
    fixed = other.weighted(1.0, each, -m)
    # What would be less than nothing without rows grows in proportion to them.
    lines.append(StageWork(fixed, other.weighted(1 / m, fixed, -1 / m), m))
  return dataclasses.replace(lines[-1], below=tuple(lines[:-1]))
