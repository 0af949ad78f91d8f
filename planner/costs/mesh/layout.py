"""The layout of values on a mesh, by the letters of their dimensions.

The rules are those of `sharding.rules`, passed in as an argument: a dimension
is sharded over those axes of its letter that the mesh has.
"""

from collections.abc import Mapping
import functools
import math

Rules = Mapping[str, str | tuple[str, ...]]
Axes = tuple[tuple[str, int], ...]


class Layout:
  """Applies sharding rules to any mesh.

  Attributes:
    rules: mesh axes of each letter.
    of_rows: mesh axes over which rows are sharded.
  """

  def __init__(self, rules: Rules):
    self.rules = {
      letter: (axes,) if isinstance(axes, str) else tuple(axes)
      for letter, axes in rules.items()
    }
    self.of_rows = self.rules.get('B', ())
    self.shared = functools.lru_cache(None)(self._shared)

  def axes_of(self, letter: str) -> tuple[str, ...]:
    return self.rules.get(letter, ())

  def _shared(self, letters, shape, axes: Axes) -> tuple[str, ...] | None:
    """Returns the axes over which an array is sharded; None if impossible."""
    sizes, used = dict(axes), []
    for letter, size in zip(letters, shape, strict=True):
      mine = [axis for axis in self.axes_of(letter) if axis in sizes]
      if size == 1 or not mine:
        continue
      if size % math.prod(sizes[axis] for axis in mine):
        return None
      used += mine
    return tuple(used) if len(set(used)) == len(used) else None

  def ways(self, letters, shape, axes: Axes) -> int:
    """Returns the number of shards of an array; 1 if it cannot be sharded."""
    used = self.shared(tuple(letters), tuple(shape), axes) or ()
    sizes = dict(axes)
    return math.prod(sizes[axis] for axis in used)

  def local(self, value, axes: Axes) -> float:
    """Returns the bytes of a value on each device."""
    return value.bytes / self.ways(value.letters, value.shape, axes)

  def row_ways(self, axes: Axes) -> int:
    """Returns how many devices share the rows of a batch."""
    return math.prod(n for axis, n in axes if axis in self.of_rows)

  def without_rows(self, axes: Axes) -> Axes:
    """Returns the axes over which rows are not sharded."""
    return tuple((axis, n) for axis, n in axes if axis not in self.of_rows)


def along(devices, axes: Axes, axis: str) -> list[tuple[int, ...]]:
  """Returns the groups of devices along an axis."""
  sizes = [n for _, n in axes]
  at = [name for name, _ in axes].index(axis)
  inner = math.prod(sizes[at + 1 :])
  run = inner * sizes[at]
  return [
    tuple(devices[first + i] for i in range(offset, run, inner))
    for first in range(0, len(devices), run)
    for offset in range(inner)
  ]


def meshes(devices: int, names: tuple[str, ...]) -> list[Axes]:
  """Lists every mesh of some axes, without axes of size one.

  Args:
    devices: number of devices.
    names: names of axes, the outermost first.
  """
  if not names:
    return [()] if devices == 1 else []
  name, *others = names
  return [
    ((name, n),) * (n > 1) + rest
    for n in range(1, devices + 1)
    if devices % n == 0
    for rest in meshes(devices // n, tuple(others))
  ]
