"""The size of the slices in which arrays move between host and device."""

from collections.abc import Sequence
import math

SLICE = 2**25  # Bytes: 0.6 ms of PCIe 5.0, many times the start of a copy.


def slice_rows(
  shape: Sequence[int], itemsize: int, platform: str | None
) -> int:
  """Returns the rows of a slice of an array on one device.

  All slices of an array have one size: the least divisor of the first dimension
  that makes `SLICE` bytes or more; the whole array if there is none. A TPU has
  the last two dimensions in tiles, and does not copy a part of a tile (libtpu
  0.0.42), so it takes an array of fewer than three dimensions whole.

  Args:
    shape: of the array on the device.
    itemsize: bytes of an element.
    platform: JAX's name of the device's kind; None for that of this process.
  """
  if platform == 'tpu' and len(shape) < 3:
    return shape[0]
  rows, bytes_a_row = shape[0], itemsize * math.prod(shape[1:])
  # Large arrays have few slices, of which the most that divide it are taken.
  most = rows * bytes_a_row // SLICE
  slices = (n for n in range(min(most, rows), 1, -1) if not rows % n)
  return rows // next(
    (n for n in slices if rows // n * bytes_a_row >= SLICE), 1
  )
