"""Bytes of a device that a call of a stage needs for itself."""

from collections.abc import Mapping
import types

from planner.costs import work
from planner.costs.measured import Estimate
from planner.costs.mesh import allowed_meshes, collectives
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
  platform: str | None = None,
  rounded: Mapping[int, int] = types.MappingProxyType({}),
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
    platform: likewise.
    rounded: what the place holds rounded of what the node reads.
  """
  call = works.get(node.name)
  if graph.is_plumbing(node) or call is None:
    return {}
  ready = _ready(flow, axes, layout, rounded, platform)
  if not isinstance(call, work.StageWork):
    found = call.bytes(flow, node, axes, layout, pieces, execution.rows)
    if ready and 'activations' in found:
      left = max(0.0, found['activations'].value - ready)
      found = found | {'activations': Estimate(left, 'modeled')}
    return found
  parameters = collectives.Parameters(flow, node, layout)
  rows = max((flow.values[v].shape[0] for v in node.rows), default=0)
  at_once = execution.rows or rows / pieces
  # Work is counted at a device's rows: chunks of logits have a limit a device.
  local_rows = at_once / allowed_meshes.row_ways(
    layout, flow, node, axes, at_once
  )
  inner = layout.without_rows(axes)
  call = call.near(local_rows).under(execution.remat).on(inner, layout)
  # Axes without rows divide them already.
  share = parameters.share(axes) / parameters.share(inner)
  made = set()
  if at_once < rows and node.stage.grain == 'sum':
    made = {*node.writes}  # They are added to the sums so far.
  done = call.at(local_rows)
  decodes = done.turns > 0 and not parameters.gradients
  if share < 1 and not decodes:
    some = done.bytes_gathered - done.bytes_sharded
    found = {'activations': done.bytes_sharded + share * some}
    if platform == 'gpu' and done.matmul:  # Only products gather parameters.
      found['transposed parameters'] = parameters.transposed(axes)
    # Those of the vocabulary are in there, and in full.
    made = {v for v in made if 'V' not in flow.values[v].letters}
  elif decodes:
    # It gathers all parameters before its loop, so that a device has what it
    # makes of them in full, such as rounded ones and copies of each layer.
    found = {'activations': max(0.0, done.bytes_alive - ready)}
    item = max(map(collectives.item_bytes, done.matmul), default=0)
    found['gathered parameters'] = parameters.gathered_as_they_are(axes, item)
  else:
    alive = call.per_row.bytes_alive * local_rows
    found = {'activations': alive + call.fixed.bytes_alive * share}
  found['sums of a micro-batch'] = sum(
    layout.local(flow.values[v], axes) for v in made
  )
  return {what: Estimate(size, 'modeled') for what, size in found.items()}


def _ready(flow, axes, layout, rounded, platform: str | None) -> float:
  """Returns the bytes of rounded parameters that decoding need not make.

  These are the embedding and the output layer, where the place holds them
  rounded. Of layers it makes copies, but for TPUs, whose loops read slices in
  place. Of what devices that share rows gather, it makes copies anyway.
  """
  values = [flow.values[w] for w in rounded.values()]
  used = [layout.shared(x.letters, x.shape, axes) or () for x in values]
  is_gathered = [bool({*some} & {*layout.of_rows}) for some in used]
  in_place = platform == 'tpu' and not any(is_gathered)
  return sum(
    layout.local(value, axes)
    for value, gathered in zip(values, is_gathered, strict=True)
    if in_place or 'V' in value.letters and not gathered
  )
