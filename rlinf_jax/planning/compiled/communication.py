"""Collective communication of a compiled program, by kind and mesh axis."""

import collections
from collections.abc import Iterable, Iterator, Sequence
import itertools
import math
import re
from typing import NamedTuple

import numpy as np

from rlinf_jax.planning.compiled import hlo

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-broadcast',
  'collective-permute',
)
UNKNOWN = '?'  # The axis of groups that are not those of a set of mesh axes.
Axes = Sequence[tuple[str, int]]


class Collective(NamedTuple):
  """One kind of collective of a call.

  Attributes:
    kind: XLA's name, such as 'all-gather'.
    axis: the mesh axes along which devices communicate, joined by '+'; '?' if
      the groups of devices are not those of a set of axes.
    count: how often it is executed.
    bytes: bytes that each device sends in all, if the collective is a ring.
  """

  kind: str
  axis: str
  count: int
  bytes: float


def collectives(module: hlo.Module, axes: Axes) -> list[Collective]:
  """Sums up the collectives of a call, most bytes first.

  Args:
    module: the program.
    axes: names and sizes of the mesh axes. Partitions are numbered in row-major
      order of the mesh, as `jax.jit` numbers them.
  """
  count, total = collections.Counter(), collections.Counter()
  for executed in _each_once(hlo.walk(module)):
    found = _collective(executed, module.num_partitions, axes)
    if found:
      key = found[:2]
      count[key] += executed.times
      total[key] += executed.times * found[2]
  return [
    Collective(kind, axis, count[kind, axis], size)
    for (kind, axis), size in total.most_common()
  ]


def _each_once(program: Iterable[hlo.Executed]) -> Iterator[hlo.Executed]:
  """Yields instructions; of the steps of a collective, the rarest.

  A TPU may run a collective in steps, each in a fusion with some arithmetic,
  which may be within a loop. All steps state the whole collective, with its
  channel and the number of the chain; the first step is executed once for each
  time that the collective is.
  """
  chains = {}
  for executed in program:
    attributes = executed.instruction.attributes
    step = executed.caller and re.search(r'\bchain_id="', attributes)
    channel = step and re.search(r'\bchannel_id=(\d+)', attributes)
    if not channel:
      yield executed
    elif executed.times < getattr(chains.get(channel[1]), 'times', math.inf):
      chains[channel[1]] = executed
  yield from chains.values()


def _collective(executed: hlo.Executed, num_partitions: int, axes: Axes):
  """Returns kind, axis and bytes sent by a device; None if it is another op."""
  instruction = executed.instruction
  kind = instruction.opcode.removesuffix('-start')
  if kind not in KINDS:
    return None
  size = sum(
    array.bytes
    for name in instruction.operands
    if name in executed.computation
    for array in executed.computation[name].arrays
  )
  if kind == 'collective-permute':
    pairs = _pairs(instruction.attributes)
    return kind, axis_of_pairs(pairs, axes), size if pairs else 0.0
  groups = replica_groups(instruction.attributes, num_partitions)
  n = len(groups[0])
  if kind == 'all-reduce' and _is_scattered(executed):
    kind = 'reduce-scatter'
  return kind, axis_of_groups(groups, axes), size * _sent(kind, n)


def _sent(kind: str, n: int) -> float:
  """Returns bytes sent by a device of n, over the bytes of its operand."""
  if kind == 'all-gather':
    return n - 1
  ring = (n - 1) / n
  return 2 * ring if kind == 'all-reduce' else ring


def _is_scattered(executed: hlo.Executed) -> bool:
  """Whether a TPU runs an all-reduce as a reduce-scatter.

  There, a fusion by this name keeps only the device's own slice of the sum.
  """
  caller = executed.caller
  return caller is not None and bool(
    re.search(r'\bcalls=%?all-reduce-scatter', caller.attributes)
  )


def replica_groups(text: str, num_partitions: int) -> list[tuple[int, ...]]:
  """Reads the groups of devices that communicate with each other.

  {{0,1},{2,3}}                  groups one by one
  [2,2]<=[4]                     0 … 3 in rows of two
  [2,2]<=[2,2]T(1,0)             the same of a transposed grid: {0,2},{1,3}
  mesh['a'=2,'b'=2] {'a'}        along an axis of a grid: {0,2},{1,3}
  mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}   of a transposed grid
  {}                             all devices
  """
  match = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? ?'
    r'\{([^}]*)\}',
    text,
  )
  if match:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    names = re.findall(r"'(\w+)'", match[3])
    ids = _grid(match[2]) if match[2] else np.arange(num_partitions)
    grid = ids.reshape([*map(int, sizes.values())])
    return _rows(grid, [[*sizes].index(name) for name in names])
  match = re.search(r'replica_groups=\[([\d,]+)\]<=(\[\S*)', text)
  if match:
    shape = tuple(map(int, match[1].split(',')))
    ids = _grid(match[2])
    return [tuple(map(int, row)) for row in ids.reshape(shape)]
  match = re.search(r'replica_groups=\{((?:\{[\d,]+\},?)+)\}', text)
  if match:
    return [
      tuple(map(int, group.split(',')))
      for group in re.findall(r'\{([\d,]+)\}', match[1])
    ]
  return [tuple(range(num_partitions))]


def _grid(text: str) -> np.ndarray:
  """Reads a grid of devices, such as [4,2] or, transposed, [2,4]T(1,0)."""
  match = re.match(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  sizes = tuple(map(int, match[1].split(',')))
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  if match[2]:
    ids = ids.transpose(tuple(map(int, match[2].split(','))))
  return ids


def _rows(grid: np.ndarray, along: Sequence[int]) -> list[tuple[int, ...]]:
  """Returns the groups of numbers of a grid that lie along some dimensions."""
  last = np.moveaxis(grid, along, range(-len(along), 0))
  size = math.prod(grid.shape[i] for i in along)
  return [tuple(map(int, row)) for row in last.reshape(-1, size)]


def axis_of_groups(groups: Sequence[tuple[int, ...]], axes: Axes) -> str:
  """Returns the mesh axes along which groups of devices lie."""
  wanted = {frozenset(group) for group in groups}
  for names, along in _groups_by_axes(axes):
    if along == wanted:
      return '+'.join(names)
  return UNKNOWN


def axis_of_pairs(pairs: Sequence[tuple[int, int]], axes: Axes) -> str:
  """Returns the fewest mesh axes that connect pairs of devices."""
  for names, along in _groups_by_axes(axes):
    group_of = {i: group for group in along for i in group}
    if all(
      b in group_of[a] for a, b in pairs if a in group_of and b in group_of
    ):
      return '+'.join(names)
  return UNKNOWN


def _groups_by_axes(axes: Axes) -> Iterator[tuple[tuple[str, ...], set]]:
  """Yields sets of mesh axes, the smallest first, and the groups along them."""
  sizes = [size for _, size in axes]
  grid = np.arange(math.prod(sizes)).reshape(sizes)
  for k in range(1, len(sizes) + 1):
    for some in itertools.combinations(range(len(sizes)), k):
      names = tuple(axes[i][0] for i in some)
      yield names, {frozenset(group) for group in _rows(grid, some)}


def _pairs(text: str) -> list[tuple[int, int]]:
  """Reads the sources and targets of a permutation."""
  match = re.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}', text)
  found = re.findall(r'\{(\d+),(\d+)\}', match[1]) if match else []
  return [(int(a), int(b)) for a, b in found if a != b]
