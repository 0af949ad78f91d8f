"""The meshes that a place of some stages may have."""

from collections.abc import Sequence
import functools
import math

from planner.costs.mesh import layout as layout_lib
from planner.ir import graph, groups


class Meshes:
  """The meshes that a place of some stages may have, memoized.

  Axes without rows stay within a node, as they communicate in every layer. They
  are the innermost, so that on several nodes the product of their sizes must
  divide `devices_per_node`. An engine outside JAX stays within a node, too, as
  it belongs to one process.

  A mesh divides what several stages read and write if it divides that of each.
  So what is known of a stage holds in every place: on many devices, a search
  asks for a hundred thousand sets of stages and sizes.
  """

  def __init__(
    self,
    flows: Sequence[graph.Flow],
    layout: layout_lib.Layout,
    devices_per_node: int,
  ):
    """Asks for nothing yet.

    Args:
      flows: those of a step, and of an evaluation where there is one, whose
        batches have rows of their own.
      layout: of values on meshes.
      devices_per_node: of the cluster.
    """
    self._flows, self._layout = flows, layout
    self._devices_per_node = devices_per_node
    self._engines = {
      node.name for flow in flows for node in flow.nodes if _is_engine(node)
    }
    self._candidates = functools.cache(self._all_meshes)
    self._demands = functools.cache(
      lambda stage: [_demands(flow, (stage,)) for flow in flows]
    )
    self._axes_read = functools.cache(self._axes_of_stage)
    self._of_stage = functools.cache(self._divided_by)

  def of(
    self, stages: tuple[str, ...], devices: int
  ) -> tuple[layout_lib.Axes, ...]:
    """Returns the meshes that a place may have, if any.

    Args:
      stages: names of its stages.
      devices: number of its devices.
    """
    if devices > self._devices_per_node and self._engines.intersection(stages):
      return ()
    wanted = frozenset().union(*map(self._axes_read, stages))
    allowed = [self._of_stage(stage, devices, wanted) for stage in stages]
    if not all(allowed):
      return ()
    return tuple(
      axes
      for axes in self._candidates(devices, wanted)
      if all(axes in some for some in allowed)
    )

  def _axes_of_stage(self, stage: str) -> frozenset[str]:
    """Returns the axes that divide a dimension of what a stage has."""
    letters = {
      letter
      for kinds, _ in self._demands(stage)
      for some, _ in kinds
      for letter in some
      if letter not in ('', 'B')
    }
    return frozenset(axis for x in letters for axis in self._layout.axes_of(x))

  def _all_meshes(self, devices: int, wanted: frozenset[str]) -> tuple:
    """Returns every mesh of some axes whose inner ones stay within a node."""
    layout, node = self._layout, self._devices_per_node
    # The first axis of rows is for replicas, and is always allowed.
    names = list(layout.of_rows[:1])
    names += [a for a in layout.of_rows[1:] if a in wanted]
    inner = sorted(wanted - set(layout.of_rows))
    return tuple(
      axes
      for axes in layout_lib.meshes(devices, (*names, *inner))
      if devices <= node
      or not node % math.prod(n for _, n in layout.without_rows(axes))
    )

  def _divided_by(
    self, stage: str, devices: int, wanted: frozenset[str]
  ) -> frozenset[layout_lib.Axes]:
    """Returns those of `_all_meshes` that divide what a stage has."""
    return frozenset(
      axes
      for axes in self._candidates(devices, wanted)
      if all(
        _divides(self._layout, axes, flow, *some)
        for flow, some in zip(self._flows, self._demands(stage), strict=True)
      )
    )


def fits(
  flow: graph.Flow,
  layout: layout_lib.Layout,
  stages: Sequence[str],
  axes: layout_lib.Axes,
) -> bool:
  """Whether a mesh divides all that some stages of a flow read and write."""
  return _divides(layout, axes, flow, *_demands(flow, stages))


def _demands(flow, stages) -> tuple[set, list[graph.Node]]:
  """Returns what a mesh of some stages must divide.

  Returns:
    Letters and shapes of the values that the stages read and write, and the
    nodes of the stages.
  """
  nodes = [node for node in flow.nodes if node.name in stages]
  kinds = {
    (value.letters, value.shape)
    for node in nodes
    for value in (flow.values[v] for v in (*node.reads, *node.writes))
  }
  return kinds, nodes


def _divides(layout, axes, flow, kinds, nodes) -> bool:
  """Whether a mesh divides what `_demands` says."""
  return all(
    layout.shared(letters, shape, axes) is not None for letters, shape in kinds
  ) and all(can_share(layout, flow, node, axes) for node in nodes)


def can_share(
  layout: layout_lib.Layout,
  flow: graph.Flow,
  node: graph.Node,
  axes: layout_lib.Axes,
  rows: int | None = None,
) -> bool:
  """Whether the devices of a mesh can run a node.

  The devices of an engine outside JAX need not have as many rows each, but must
  be able to divide its model.

  Args:
    layout: of values on meshes.
    flow: the flow of the node.
    node: the call of a stage.
    axes: of the mesh.
    rows: of a micro-batch; None for all.
  """
  if graph.is_plumbing(node) or not axes:
    return True
  if node.stage.host:
    ranks = math.prod(n for _, n in layout.without_rows(axes))
    return not _is_engine(node) or ranks in node.stage.engine.ranks
  rows, devices = rows or flow.rows_of(node), layout.row_ways(axes)
  return not rows or groups.ways(flow, node, rows, devices) is not None


def row_ways(
  layout: layout_lib.Layout,
  flow: graph.Flow,
  node: graph.Node,
  axes: layout_lib.Axes,
  rows: float,
) -> int:
  """Returns among how many devices of a mesh the rows of a call are divided.

  It is 1 where each device computes all of them, see `groups.ways`. Rows that
  the mesh cannot share count as if it could.

  Args:
    layout: of values on meshes.
    flow: the flow of the node.
    node: the call of a stage.
    axes: of the mesh.
    rows: that the call takes at once.
  """
  devices = layout.row_ways(axes)
  if graph.is_plumbing(node) or not rows:
    return devices
  return groups.ways(flow, node, rows, devices) or devices


def _is_engine(node: graph.Node) -> bool:
  """Whether a node is an engine outside JAX that may divide its model."""
  if graph.is_plumbing(node) or not node.stage.host:
    return False
  engine = node.stage.engine
  return engine is not None and engine.ranks is not None
