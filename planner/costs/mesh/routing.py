"""Bytes that the devices of a mesh send where a node only moves rows.

Such a node makes several runs of rows, such as minibatches or the pieces of a
batch, each of which the devices share as they share the batch; or it joins
pieces. XLA moves rows in one of three ways. Runs of adjacent rows, of a stage
of grain 'split' or of a batch that is cut, go from device to device in
permutations. Rows that are taken by their ids, by a stage of grain 'slice', are
looked up by each device among its own; the results are added up. To join
pieces, devices exchange their rows for a part of another dimension of all rows,
and exchange these back; without such a dimension, they gather all rows.
"""

import functools
import math

from planner.ir import graph


def sent(
  flow: graph.Flow, node: graph.Node, layout, axes, scatters_sums: bool
) -> tuple[float, float]:
  """Returns the bytes that a device sends, and its consecutive messages.

  Args:
    flow: the flow of the node.
    node: a call of a stage that only moves rows, or a split or a join that was
      added as the batch was cut.
    layout: the layout of values on meshes.
    axes: axes of the mesh.
    scatters_sums: as in `cluster.Cluster`.
  """
  ways = layout.row_ways(axes)
  if ways == 1:
    return 0.0, 0.0
  if graph.is_plumbing(node):
    return _sent_by_cut(flow, node, layout, axes, ways)
  if not node.rows:
    return 0.0, 0.0
  if node.stage.grain == 'split':
    runs = len(node.writes) // len(node.reads)
    share, messages = permuted(runs, ways)
    size = sum(flow.values[v].bytes for v in node.rows)
    return share * size, messages * len(node.rows)
  # Devices with the same rows divide the sums, and then exchange the rows.
  copies = min(ways, math.prod(n for _, n in axes) // ways)
  size = sum(flow.values[v].bytes for v in node.writes)
  times = 1 if scatters_sums else 2
  summed = times * (ways - 1) / ways * size / copies
  return summed + (size / ways if copies > 1 else 0.0), 1.0


def _sent_by_cut(flow, node, layout, axes, ways: int) -> tuple[float, float]:
  """Returns the same for a split or a join; sums are added where they are."""
  if node.stage.name == 'split':
    (v,) = node.reads
    share, messages = permuted(len(node.writes), ways)
    return share * ways * layout.local(flow.values[v], axes), messages
  if node.stage.name != 'join':
    return 0.0, 0.0
  (v,) = node.writes
  local = layout.local(flow.values[v], axes)
  if any(size % ways == 0 for size in flow.values[v].shape[1:]):
    return 2 * (ways - 1) / ways * local, 2.0
  return (ways - 1) * local, 1.0


@functools.cache
def permuted(runs: int, ways: int) -> tuple[float, int]:
  """Returns the share of a batch that is sent to split it, and the messages.

  Each of `ways` devices has as many adjacent rows, and is to have as many of
  each of `runs` runs. In a permutation, every device sends adjacent rows to one
  other device at most, all devices equally many: those from the first to the
  last that any of them is to send. The share is exact if one of the two numbers
  divides the other.
  """
  share, messages = 0, 0
  for run in range(runs):
    to_send = {}  # Parts of each device's rows, in the order of the targets.
    for target in range(ways):
      source, part = divmod(run * ways + target, runs)
      if source != target:
        to_send.setdefault(source, []).append(part)
    turns = max(map(len, to_send.values()), default=0)
    for turn in range(turns):
      parts = [some[turn] for some in to_send.values() if turn < len(some)]
      share += max(parts) - min(parts) + 1
    messages += turns
  return share / (runs * ways), messages
