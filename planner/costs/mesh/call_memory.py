"""Bytes of a device that a call of a stage needs for itself."""

from planner.costs import work
from planner.costs.measured import Estimate
from planner.costs.mesh import collectives
from planner.ir import graph
from planner.ir import plan as plan_lib


def within(
  flow: graph.Flow,
  node: graph.Node,
  axes,
  execution: plan_lib.Execution,
  pieces: int,
  works,
  layout,
  adds_phases: bool = False,
  platform: str | None = None,
) -> dict[str, Estimate]:
  """Returns the bytes that a stage itself needs, by component.

  Args:
    flow: as recorded.
    node: a node of that flow.
    axes: of its mesh.
    execution: its micro-batch and its remat.
    pieces: number of pieces that the batch passes in.
    works: as in `MemoryModel`.
    layout: likewise.
    adds_phases: likewise.
    platform: likewise.
  """
  call = works.get(node.name)
  if graph.is_plumbing(node) or call is None:
    return {}
  if not isinstance(call, work.StageWork):
    return call.bytes(flow, node, axes, layout, pieces, execution.rows)
  parameters = collectives.Parameters(flow, node, layout)
  rows = max((flow.values[v].shape[0] for v in node.rows), default=0)
  at_once = execution.rows or rows / pieces
  # Work is counted at a device's rows: chunks of logits have a limit a device.
  local_rows = at_once / layout.row_ways(axes)
  inner = layout.without_rows(axes)
  call = call.near(local_rows).under(execution.remat).on(inner, layout)
  # Axes without rows divide them already.
  share = parameters.share(axes) / parameters.share(inner)
  made = set()
  if at_once < rows and node.stage.grain == 'sum':
    made = {*node.writes}  # They are added to the sums so far.
  done = call.at(local_rows)
  decodes = done.turns > 0 and not parameters.gradients
  if share < 1 and not adds_phases and not decodes:
    some = done.bytes_gathered - done.bytes_sharded
    found = {'activations': done.bytes_sharded + share * some}
    if platform == 'gpu' and done.matmul:  # Only products gather parameters.
      found['transposed parameters'] = parameters.transposed(axes)
    # Those of the vocabulary are in there, and in full.
    made = {v for v in made if 'V' not in flow.values[v].letters}
  else:
    found = _sum_of_phases(flow, node, call, local_rows, axes, parameters)
  found['sums of a micro-batch'] = sum(
    layout.local(flow.values[v], axes) for v in made
  )
  return {what: Estimate(size, 'modeled') for what, size in found.items()}


def _sum_of_phases(
  flow, node, call, rows, axes, parameters
) -> dict[str, float]:
  """Returns the bytes of a stage of which every phase has memory of its own.

  Arguments are those of `within`, but for the segment of the stage's work on a
  device, its rows there, and the stage's parameters.
  """
  layout = parameters.layout
  inner = layout.without_rows(axes)
  share = parameters.share(axes) / parameters.share(inner)
  packed = _packed_row_bytes(flow, node, call, inner, layout)
  alive = call.per_row.bytes_alive * rows + packed
  fixed = (call.fixed.bytes_alive - packed) * share
  matmul = call.fixed.matmul | call.per_row.matmul
  item = max(map(collectives.item_bytes, matmul), default=0)
  gathered, _ = parameters.gathered(axes, item)
  if parameters.gradients:  # A scan gathers one layer ahead.
    gathered *= min(1.0, 2 / parameters.depth)
  elif not call.at(rows).turns:  # Decoding has all of them before its loop.
    gathered = parameters.gathered_in_turn(axes, item)
  return {
    'activations': alive + fixed,
    'gathered parameters': gathered,
    'unscattered gradients': parameters.unscattered(axes),
  }


def _packed_row_bytes(flow, node, call, inner, layout) -> float:
  """Returns the bytes of activations of a packed row; 0 without packed rows.

  A loop over packed rows has those of one at a time, for any number of rows, so
  they are among the fixed bytes. But a device has a packed row to itself, while
  other fixed bytes are sharded like parameters. These are the gradients of a
  packed row, which are added to the results so far.
  """
  if not (call.fixed.passes or call.per_row.passes):
    return 0.0
  sums = 0
  if node.stage.grain == 'sum':
    sums = sum(layout.local(flow.values[v], inner) for v in node.writes)
  return max(0.0, call.fixed.bytes_alive - sums)
