"""How values lie on a mesh, by the letters of their dimensions, without JAX.

The rules are those of `sharding.rules`, which are handed in: a letter is shared
over those of its axes that the mesh has.
"""

from collections.abc import Mapping
import functools
import itertools
import math

Rules = Mapping[str, str | tuple[str, ...]]
Axes = tuple[tuple[str, int], ...]


class Layout:
  """The rules, and what follows from them on any mesh.

  Attributes:
    rules: axes of each letter.
    of_rows: axes that share rows.
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
    """The axes over which an array is shared; None where it cannot be."""
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
    """Into how many parts an array is cut; 1 where it cannot be."""
    used = self.shared(tuple(letters), tuple(shape), axes) or ()
    sizes = dict(axes)
    return math.prod(sizes[axis] for axis in used)

  def local(self, value, axes: Axes) -> float:
    """Bytes of a value on each device."""
    return value.bytes / self.ways(value.letters, value.shape, axes)

  def row_ways(self, axes: Axes) -> int:
    """How many devices share the rows of a batch."""
    return math.prod(n for axis, n in axes if axis in self.of_rows)


def along(devices, axes: Axes, axis: str) -> list[tuple[int, ...]]:
  """The groups of devices that share something along an axis."""
  sizes = [n for _, n in axes]
  at = [name for name, _ in axes].index(axis)
  inner = math.prod(sizes[at + 1 :])
  run = inner * sizes[at]
  return [
    tuple(devices[first + i] for i in range(offset, run, inner))
    for first in range(0, len(devices), run)
    for offset in range(inner)
  ]


def meshes(devices: int, names: tuple[str, ...], most: Mapping[str, int]):
  """Every mesh of some axes; those of size one are left out.

  Args:
    devices: how many.
    names: of axes, the outermost first.
    most: the largest size of an axis; any if it is not named.
  """
  if devices == 1:
    return [()]
  divisors = [n for n in range(1, devices + 1) if devices % n == 0]
  sizes = [
    [n for n in divisors if n <= most.get(name, devices)] for name in names
  ]
  return [
    tuple((name, n) for name, n in zip(names, some, strict=True) if n > 1)
    for some in itertools.product(*sizes)
    if math.prod(some) == devices
  ]
