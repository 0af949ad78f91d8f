"""What moves when an array changes its layout or its devices.

`jax.device_put` does the moving. This says, without moving anything, which part
of it goes over which link: what a cost model prices, and what a link reports.
"""

import collections
from collections.abc import Iterable
import math
from typing import NamedTuple

import jax

Box = tuple[tuple[int, int], ...]  # Begin and end of each dimension.


class Move(NamedTuple):
  """A part of an array that goes from one device to another.

  Attributes:
    source: id of the device that has it.
    target: id of the device that wants it; the same where nothing moves.
    box: begin and end of each dimension.
  """

  source: int
  target: int
  box: Box

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(end - begin for begin, end in self.box)


def moves(
  shape: tuple[int, ...], source: jax.sharding.Sharding, target
) -> list[Move]:
  """The parts in which an array of `shape` goes from a layout to another.

  Of the devices that hold a copy of a part, the one that wants it gives it to
  itself; else the one gives that has given least so far.
  """
  holders = collections.defaultdict(list)
  for device, index in source.devices_indices_map(shape).items():
    holders[_box(index, shape)].append(device.id)
  given = collections.Counter()
  made = []
  for device, index in target.devices_indices_map(shape).items():
    want = _box(index, shape)
    for have, devices in holders.items():
      part = _overlap(want, have)
      if part is None:
        continue
      giver = device.id
      if giver not in devices:
        giver = min(devices, key=lambda d: (given[d], d))
      move = Move(giver, device.id, part)
      if giver != device.id:
        given[giver] += move.size
      made.append(move)
  return made


def bytes_by_link(
  found: Iterable[Move], itemsize: int
) -> dict[tuple[int, int], int]:
  """Bytes that go over each link `(source, target)`; none to oneself."""
  total = collections.Counter()
  for move in found:
    if move.source != move.target:
      total[move.source, move.target] += move.size * itemsize
  return dict(total)


def _box(index, shape) -> Box:
  return tuple(
    part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
  )


def _overlap(one: Box, other: Box) -> Box | None:
  """What two boxes have in common; None for nothing."""
  both = tuple(
    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
  )
  return both if all(begin < end for begin, end in both) else None
