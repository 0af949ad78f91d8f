"""The meshes that a place of some stages may have."""

from collections.abc import Sequence

from planner.costs.mesh import layout as layout_lib
from planner.ir import graph


def meshes(
  flow: graph.Flow,
  layout: layout_lib.Layout,
  devices_per_node: int,
  stages: tuple[str, ...],
  devices: int,
) -> Sequence[layout_lib.Axes]:
  """Returns the meshes that a place of some stages may have, if any.

  Axes without rows stay within a node, as they communicate in every layer.

  Args:
    flow: as recorded.
    layout: of values on meshes.
    devices_per_node: of the cluster.
    stages: names of the stages.
    devices: number of devices of the place.
  """
  nodes = [n for n in flow.nodes if n.name in stages]
  kinds = {
    (value.letters, value.shape)
    for node in nodes
    for value in (flow.values[v] for v in (*node.reads, *node.writes))
  }
  letters = {x for some, _ in kinds for x in some if x not in ('', 'B')}
  wanted = {axis for x in letters for axis in layout.axes_of(x)}
  # The first axis of rows is for replicas, and is always allowed.
  names = list(layout.of_rows[:1])
  names += [a for a in layout.of_rows[1:] if a in wanted]
  inner = sorted(wanted - set(layout.of_rows))
  most = dict.fromkeys(inner, devices_per_node)

  def fits(axes):
    return all(
      layout.shared(some, shape, axes) is not None for some, shape in kinds
    ) and all(can_share(layout, flow, node, axes) for node in nodes)

  found = layout_lib.meshes(devices, (*names, *inner), most)
  return tuple(axes for axes in found if fits(axes))


def can_share(
  layout: layout_lib.Layout,
  flow: graph.Flow,
  node: graph.Node,
  axes: layout_lib.Axes,
  rows: int | None = None,
) -> bool:
  """Whether a node's rows can be divided among devices in whole groups.

  Args:
    layout: of values on meshes.
    flow: the flow of the node.
    node: the call of a stage.
    axes: of the mesh.
    rows: of a micro-batch; None for all.
  """
  if graph.is_plumbing(node) or node.stage.host or not axes:
    return True
  ways = layout.row_ways(axes)
  return all(
    (rows or flow.values[v].shape[0]) // node.stage.group_size % ways == 0
    for v in node.rows
  )
