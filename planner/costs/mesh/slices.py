"""Bytes on a device of values that a call updates in host memory."""

from collections.abc import Mapping
import math

from planner.ir import graph
from sharding import slices


def bytes_on_device(
  flow: graph.Flow,
  node: graph.Node,
  streamed: Mapping[int, int],
  axes,
  call,
  layout,
  platform: str | None,
) -> float:
  """Returns the bytes that a call has of such values on a device at a time.

  Values that are updated together are there by a slice each, before and after
  the update, one part of the call after another. A part that reads whole arrays
  has them there in full.

  Args:
    flow: as recorded.
    node: the call.
    streamed: its values, as `offloading.streamed`.
    axes: of the mesh.
    call: the `StageWork` of the stage, which knows the parts.
    layout: the layout of values on meshes.
    platform: as in `sharding.slices.slice_rows`.
  """
  sliced, whole = [0.0], {*streamed}
  for part in getattr(call, 'elementwise', ()):
    some = [node.reads[i] for i in part if node.reads[i] in streamed]
    sizes = [_slice_bytes(flow.values[v], axes, layout, platform) for v in some]
    full = [layout.local(flow.values[v], axes) for v in some]
    if sizes < full:  # A single slice waits for no other part.
      whole.difference_update(some)
      sliced.append(sum(sizes))
  there = sum(layout.local(flow.values[v], axes) for v in whole)
  return 2 * (max(sliced) + there)


def _slice_bytes(value, axes, layout, platform) -> float:
  """Returns the bytes of a slice of a value on a device."""
  local, rows = layout.local(value, axes), value.shape[0]
  if layout.ways(value.letters, value.shape, axes) > 1:
    rows //= layout.ways(value.letters[:1], value.shape[:1], axes)
  size = value.dtype.itemsize
  ones = (1,) * (len(value.shape) - 2)
  columns = (math.ceil(local / rows / size), *ones)[: len(value.shape) - 1]
  there = slices.slice_rows((rows, *columns), size, platform)
  return there * local / rows
