"""The work of a stage call as plain data: arithmetic and memory traffic.

`counting.count` counts it with JAX; cost models read it without.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math

from planner.ir import plan as plan_lib


@dataclasses.dataclass(frozen=True)
class Work:
  """The work of one call that runs on one device.

  Attributes:
    flops: arithmetic operations of any kind; a multiply-add is two.
    matmul: operations of matrix products and convolutions, by type of the
      operands.
    bytes_in: bytes of the arguments.
    bytes_out: bytes of the results.
    bytes_moved: bytes to and from device memory, if elementwise arithmetic is
      fused with its consumer and everything else reads and writes its operands.
    bytes_alive: peak bytes of intermediate values, without arguments and
      results.
    bytes_gathered: the same on devices that share parameters and gather them,
      with all of each array of the shape of a parameter, such as a sum of
      gradients.
    bytes_sharded: the same without those of these arrays that they share.
    kernels: number of kernels launched one after another.
    partial: products summed over a dimension of an argument, by that
      dimension's letter: their number, the bytes of their results, and those of
      them that are scattered. Where the letter is sharded, devices all-reduce
      the results. One that they gather or scatter counts with half of its
      bytes.
    passes: trip count of a loop over packed rows, each of which reads all
      parameters; 0 if there is none.
    turns: trip count of the longest loop that may end early, as decoding does,
      with the loops of other parts of the same tokens; 0 if there is none.
    reads: by the position of an argument, how often loops over its layers have
      products with them, and one more if others have some with it. Where
      devices share it, each of them gathers it as often, but not to look up
      some of its rows. Empty if unknown.
  """

  flops: float = 0.0
  matmul: Mapping[str, float] = dataclasses.field(default_factory=dict)
  bytes_in: float = 0.0
  bytes_out: float = 0.0
  bytes_moved: float = 0.0
  bytes_alive: float = 0.0
  bytes_gathered: float = 0.0
  bytes_sharded: float = 0.0
  kernels: float = 0.0
  passes: float = 0.0
  partial: Mapping[str, tuple[float, float, float]] = dataclasses.field(
    default_factory=dict
  )
  turns: float = 0.0
  reads: Mapping[int, float] = dataclasses.field(default_factory=dict)

  @property
  def matmul_flops(self) -> float:
    return sum(self.matmul.values())

  @property
  def other_flops(self) -> float:
    """Operations of elementwise arithmetic, reductions and the like."""
    return max(0.0, self.flops - self.matmul_flops)

  def weighted(self, n: float, other: 'Work', m: float) -> 'Work':
    """Returns `n · self + m · other`, clipped at zero."""

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
            self.partial.get(letter, (0.0, 0.0, 0.0)),
            other.partial.get(letter, (0.0, 0.0, 0.0)),
            strict=True,
          )
        )
        for letter in letters
      },
      turns=max(self.turns, other.turns),
      reads={
        i: max(self.reads.get(i, 0.0), other.reads.get(i, 0.0))
        for i in {**self.reads, **other.reads}
      },
    )

  def __add__(self, other: 'Work') -> 'Work':
    return self.weighted(1.0, other, 1.0)

  def times(self, n: float) -> 'Work':
    return self.weighted(n, NONE, 0.0)


SCALARS = tuple(
  field.name
  for field in dataclasses.fields(Work)
  if field.name not in ('matmul', 'partial', 'turns', 'reads')
)
NONE = Work()
STRAIGHT = 0.005  # The largest relative distance of a line from a count.


@dataclasses.dataclass(frozen=True)
class StageWork:
  """The work of a stage as a piecewise linear function of its rows.

  Attributes:
    fixed: work that does not depend on rows, such as reading parameters.
    per_row: additional work for each row.
    rows: largest number of rows of this segment, which is the full batch for
      the last one; 0 for a stage without rows.
    below: the segments for fewer rows, the fewest first. For example, a stage
      that computes logits in chunks has fewer chunks then.
    remat: this segment where the backward pass computes activations again, by
      the policies that a plan may name.
    count: counts a call with some rows, as `count_at_any_size`; None if the
      segments are all that is known.
    divide: counts this segment again for devices that divide its arrays, see
      `on`; None if they divide none.
    elementwise: positions of arguments that the stage may update in host
      memory, and of which it computes each element alone: a tuple for each
      independent part.
  """

  fixed: Work
  per_row: Work = NONE
  rows: int = 0
  below: tuple['StageWork', ...] = ()
  remat: Mapping[str, 'StageWork'] = dataclasses.field(default_factory=dict)
  count: Callable[[int], Work] | None = dataclasses.field(
    default=None, compare=False
  )
  divide: Callable[..., 'StageWork'] | None = dataclasses.field(
    default=None, compare=False
  )
  elementwise: tuple[tuple[int, ...], ...] = ()

  def on(self, axes: tuple[tuple[str, int], ...], layout) -> 'StageWork':
    """Returns this segment on a device of a mesh of axes without rows.

    Bytes are those of a device, and `partial` also has what devices gather and
    scatter. FLOPs are those of all devices.

    Args:
      axes: names and sizes of the axes.
      layout: a `mesh.layout.Layout`.
    """
    return self.divide(axes, layout) if axes and self.divide else self

  def under(self, remat: str) -> 'StageWork':
    """Returns this segment under a policy, as `plan.Plan.remat` has it.

    Raises:
      ValueError: if it was not counted under this policy.
    """
    if remat == plan_lib.STORE_ALL:
      return self
    if remat not in self.remat:
      raise ValueError(
        f'The plan gives a stage remat {remat!r}, with which its work was not '
        f'counted: choose one of {[plan_lib.STORE_ALL, *self.remat]}.'
      )
    return self.remat[remat]

  def near(self, rows: float) -> 'StageWork':
    """Returns the segment for a number of rows."""
    return next((call for call in self.below if rows <= call.rows), self)

  def at(self, rows: float) -> Work:
    """Returns the work of a call with `rows` rows, interpolated."""
    line = self.near(rows)
    return line.fixed.weighted(1.0, line.per_row, rows)

  def exactly(self, rows: float) -> Work:
    """Returns the work of a call with `rows` rows, counted where it can be."""
    if self.count is None or rows % 1:
      return self.at(rows)
    counted = self.count(int(rows))
    return self.at(rows) if counted is None else counted

  @property
  def full_batch(self) -> Work:
    """The work of a call with the full batch."""
    return self.at(self.rows)


def count_at_any_size(
  count: Callable[[int], Work], sizes: Sequence[int]
) -> Callable[[int], Work]:
  """Returns `rows -> work`, which counts as few sizes as it needs to.

  Work is a line between two of `sizes` if about as many kernels are launched at
  both, or if one of them lies on the line between its neighbors. Else each
  number of rows is counted by itself. So are chunks of queries, each of which
  reads all keys: there are more of them if there are more rows. What is
  returned does not depend on what was asked before.

  Args:
    count: counts a call with some rows, memoized.
    sizes: numbers of rows to begin with, the fewest first.
  """

  @functools.cache
  def is_on_line(i):
    """Whether a size lies on the line between its neighbors."""
    if not 0 < i < len(sizes) - 1:
      return False
    one, this, other = map(count, sizes[i - 1 : i + 2])
    ends = sizes[i - 1 : i + 2 : 2]
    return _is_close(_between(sizes[i], ends, one, other), this)

  @functools.cache
  def is_line(i):
    """Whether work is a line between a size and the next one."""
    kernels = [count(n).kernels for n in sizes[i : i + 2]]
    alike = math.isclose(*kernels, rel_tol=STRAIGHT)
    return alike or is_on_line(i + 1) or is_on_line(i)

  def at(rows):
    i = bisect.bisect_left(sizes, rows)
    if not 0 < i < len(sizes) or rows == sizes[i] or not is_line(i - 1):
      return count(rows)
    ends = sizes[i - 1 : i + 1]
    return _between(rows, ends, *map(count, ends))

  return functools.cache(at)


def _between(rows: int, ends: Sequence[int], one: Work, other: Work) -> Work:
  """Returns the work at `rows` on the line between two sizes."""
  low, high = ends
  share = (rows - low) / (high - low)
  return one.weighted(1 - share, other, share)


def _is_close(one: Work, other: Work) -> bool:
  """Whether seconds of two works would differ by half a percent at most."""
  return all(
    math.isclose(getattr(one, field), getattr(other, field), rel_tol=STRAIGHT)
    for field in ('flops', 'matmul_flops', 'bytes_moved', 'kernels', 'passes')
  )


def piecewise_linear(points: Sequence[tuple[int, Work]]) -> StageWork:
  """Interpolates the work of calls with several numbers of rows.

  Args:
    points: rows and their work, the fewest first. A single point is constant.
  """
  rows = [n for n, _ in points]
  if not rows or rows != sorted(set(rows)):
    raise ValueError(f'Interpolation needs rising numbers of rows: got {rows}.')
  if len(points) == 1:
    return StageWork(points[0][1], rows=rows[0])
  lines = []
  for (n, one), (m, other) in itertools.pairwise(points):
    each = other.weighted(1 / (m - n), one, -1 / (m - n))
    fixed = other.weighted(1.0, each, -m)
    # A negative intercept becomes proportional work.
    lines.append(StageWork(fixed, other.weighted(1 / m, fixed, -1 / m), m))
  return dataclasses.replace(lines[-1], below=tuple(lines[:-1]))
