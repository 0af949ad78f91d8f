"""Seconds and bytes of stages on placements, modeled from their work.

A call takes its launch, then as long as its arithmetic or its traffic takes,
whichever is longer, then what its devices say to each other. Where a stage was
measured, that is taken instead. Every number can be asked where it comes from.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Protocol

from planner import cluster as cluster_lib
from planner.costs import breakdown, collectives, memory
from planner.costs import layout as layout_lib
from planner.costs import measured as measured_lib
from planner.costs.measured import Estimate
from planner.costs.work import StageWork
from planner.ir import graph
from planner.ir import plan as plan_lib


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """Numbers that are neither on a data sheet nor counted.

  Attributes:
    matmul_efficiency: fraction of the peak that matrix products reach.
    vector_efficiency: fraction of the peak that other arithmetic reaches.
    memory_efficiency: fraction of the memory bandwidth that is reached.
    exposed_communication: fraction of the communication between devices that
      does not overlap with arithmetic.
    host_seconds_per_row: seconds that a host stage spends on a row.
  """

  matmul_efficiency: float = 0.5
  vector_efficiency: float = 0.5
  memory_efficiency: float = 0.8
  exposed_communication: float = 1.0
  host_seconds_per_row: float = 1e-4


class Process(Protocol):
  """What is no line over its rows, such as `decode.DecodeWork`."""

  def seconds(
    self,
    model: 'Roofline',
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int,
  ) -> Mapping[str, Estimate]:
    """Of a call, so many rows at a time: parts that add up."""

  def bytes(
    self,
    flow: graph.Flow,
    node: graph.Node,
    axes: layout_lib.Axes,
    layout: layout_lib.Layout,
    pieces: int,
    rows: int | None,
  ) -> Mapping[str, Estimate]:
    """That a device of a mesh needs meanwhile: parts that add up."""


class Roofline:
  """A model of costs, as `planner.search` asks for one.

  Attributes:
    capacity: bytes of a device that plans may use.
  """

  def __init__(
    self,
    flow: graph.Flow,
    works: Mapping[str, StageWork | Process | None],
    cluster: cluster_lib.Cluster,
    rules: layout_lib.Rules,
    measured: measured_lib.Measurements = measured_lib.Measurements(),
    assumed: Assumptions = Assumptions(),
  ):
    """Takes what is known.

    Args:
      flow: as recorded.
      works: of its stages, as `count.of_flow`; None for the host's.
      cluster: what it runs on.
      rules: axes of letters, as `sharding.rules.DEFAULT`.
      measured: seconds of stages, which win over the model.
      assumed: what else the model needs.
    """
    missing = [name for name in flow.stages if name not in works]
    if missing:
      raise ValueError(
        f'Nothing is known of the work of {missing}: count the flow that is to '
        'be planned.'
      )
    self.flow, self.works, self.cluster = flow, works, cluster
    self.layout = layout_lib.Layout(rules)
    self.axis_links = collectives.AxisLinks(cluster)
    self.measured, self.assumed = measured, assumed
    self.capacity = cluster.capacity
    self.axes = functools.cache(self._axes)
    self._known, self._places = {}, {}

  def with_measurements(
    self, measured: measured_lib.Measurements
  ) -> 'Roofline':
    """The same model, after more was measured."""
    return Roofline(
      self.flow,
      self.works,
      self.cluster,
      self.layout.rules,
      measured,
      self.assumed,
    )

  # Meshes.

  def _axes(self, stages: tuple[str, ...], devices: int) -> Sequence:
    """Meshes that a place of these stages may have; none if it cannot be.

    Axes without rows stay within a node: they talk at every layer.
    """
    nodes = [n for n in self.flow.nodes if n.name in stages]
    kinds = {
      (value.letters, value.shape)
      for node in nodes
      for value in (self.flow.values[v] for v in (*node.reads, *node.writes))
    }
    letters = {x for some, _ in kinds for x in some if x not in ('', 'B')}
    wanted = {axis for x in letters for axis in self.layout.axes_of(x)}
    # The first axis of rows is for copies, and is always there.
    names = list(self.layout.of_rows[:1])
    names += [a for a in self.layout.of_rows[1:] if a in wanted]
    inner = sorted(wanted - set(self.layout.of_rows))
    most = dict.fromkeys(inner, self.cluster.devices_per_node)

    def fits(axes):
      return all(
        self.layout.shared(some, shape, axes) is not None
        for some, shape in kinds
      ) and all(self._can_share(self.flow, node, axes) for node in nodes)

    menu = layout_lib.meshes(devices, (*names, *inner), most)
    return tuple(axes for axes in menu if fits(axes))

  def _can_share(self, flow, node, axes, rows: int | None = None) -> bool:
    """Whether devices can have as many whole groups of rows each."""
    if graph.is_plumbing(node) or node.stage.host or not axes:
      return True
    ways = self.layout.row_ways(axes)
    return all(
      (rows or flow.values[v].shape[0]) // node.stage.group_size % ways == 0
      for v in node.rows
    )

  # Seconds.

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
  ) -> float:
    """Of a call of a node; infinite where devices cannot share its rows."""
    if graph.is_plumbing(node) or not node.rows:
      return self.explain(flow, node, placement, rows).total.value
    there = flow.rows_of(node)
    # Nodes of a stage that have as many rows cost the same, if it is a line.
    line = isinstance(self.works.get(node.name), StageWork)
    key = node.name, there, rows, placement, None if line else node.piece
    if key not in self._known:
      found = self.explain(flow, node, placement, rows)
      self._known[key] = found.total.value
    return self._known[key]

  def explain(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None = None,
  ) -> breakdown.CostBreakdown:
    """What the seconds of a call are made of.

    Args:
      flow: as cut; a piece's rows are those of what it reads.
      node: of that flow.
      placement: where it runs.
      rows: at a time; None for all.
    """
    if graph.is_plumbing(node):
      return self._moved(flow, node, placement)
    there = flow.rows_of(node)
    rows = rows or there
    if there and (
      there % rows or not self._can_share(flow, node, placement.axes, rows)
    ):
      return breakdown.CostBreakdown(Estimate(math.inf, 'modeled'), {})
    turns = there / rows if there else 1
    found = self._measured(flow, node, placement, rows, turns)
    factor = self.measured.factors.get(node.name, 1.0)
    if factor == 1.0:
      return found
    return breakdown.scaled(
      found,
      Estimate(factor, 'measured'),
      'times, as a run has taken',
      found.total.tag,
    )

  def _measured(self, flow, node, placement, rows, turns):
    """As measured; else as modeled, scaled by what was measured nearest."""
    table = self.measured
    key = node.name, len(placement.devices), tuple(placement.axes)
    if key in table.constants:
      return breakdown.single(
        Estimate(table.constants[key], 'measured'), 'call'
      )
    curve = table.curve(key, turns)
    spent = curve and curve.at(rows)
    if spent is not None:
      return breakdown.single(Estimate(turns * spent, 'measured'), 'call')
    found = self._modeled(flow, node, placement, rows, turns)
    other = key if curve else table.elsewhere(node.name)
    if other is None:
      return found
    _, devices, axes = other
    near, spent = rows, table.constants.get(other)
    if spent is None:
      # At as many rows a device, if that was measured.
      ways = self.layout.row_ways(placement.axes) / self.layout.row_ways(axes)
      near, each = table.curve(other, turns).nearest(rows / ways)
      spent = turns * each
    there = plan_lib.Placement(tuple(range(devices)), axes)
    modeled = self._modeled(flow, node, there, near, turns).total.value
    return breakdown.scaled(
      found,
      Estimate(spent / modeled, 'measured'),
      f'times, as measured at {near:g} rows',
    )

  def _moved(self, flow, node, placement):
    """What planners add moves bytes and does no more."""
    device = self.cluster.device
    values = [flow.values[v] for v in (*node.reads, *node.writes)]
    size = sum(self.layout.local(value, placement.axes) for value in values)
    spent = size / (device.memory_bandwidth * self.assumed.memory_efficiency)
    return breakdown.CostBreakdown(
      Estimate(device.launch_seconds + spent, 'modeled'),
      {
        'launch': Estimate(device.launch_seconds, 'assumed'),
        'traffic': Estimate(spent, 'modeled'),
      },
    )

  def _modeled(self, flow, node, placement, rows, turns):
    others = 0 if node.stage.host else len(placement.devices) - 1
    slower = self.contention(node.name, 1, others)
    found = self._alone(flow, node, placement, rows, turns)
    if slower == 1.0:
      return found
    known = node.name in self.measured.contention
    times = Estimate(slower, 'measured' if known else 'assumed')
    return breakdown.scaled(found, times, 'times, as devices share cores')

  def _alone(self, flow, node, placement, rows, turns):
    """As modeled, if no device keeps another from its work."""
    call = self.works[node.name]
    if call is None:
      return self._on_host(flow, node, rows * turns)
    if not isinstance(call, StageWork):
      parts = call.seconds(self, flow, node, placement, rows)
      tags = {number.tag for number in parts.values()}
      tag = 'assumed' if 'assumed' in tags else 'modeled'
      total = sum(number.value for number in parts.values())
      return breakdown.CostBreakdown(Estimate(total, tag), parts)
    call = call.near(rows)
    device, assumed, axes = self.cluster.device, self.assumed, placement.axes
    parameters = collectives.Parameters(flow, node, self.layout)
    if rows:
      ways = parameters.ways(axes)
      share = 1 / ways, rows / self.layout.row_ways(axes) / ways
    else:
      share = self._share(flow, node, axes), 0.0
    own = call.fixed.weighted(share[0], call.per_row, share[1])
    arithmetic = own.other_flops / (
      device.vector_flops * assumed.vector_efficiency
    ) + sum(
      flops / (device.peak(kind) * assumed.matmul_efficiency)
      for kind, flops in own.matmul.items()
    )
    traffic = own.bytes_moved / (
      device.memory_bandwidth * assumed.memory_efficiency
    )
    # Devices share the numbers of a kernel, not the kernels.
    gaps = call.at(rows).kernels * device.kernel_gap_seconds
    parts = {
      'launch': Estimate(device.launch_seconds, 'assumed'),
      'gaps between kernels': Estimate(turns * gaps, 'assumed'),
      'arithmetic': Estimate(turns * arithmetic, 'modeled'),
      'traffic': Estimate(turns * traffic, 'modeled'),
    }
    total = device.launch_seconds + turns * (gaps + max(arithmetic, traffic))
    for part in collectives.communication(parameters, call.at(rows), axes):
      link = self.axis_links.link(placement, part.axis)
      spent = (
        link.seconds(part.size, part.messages) * assumed.exposed_communication
      )
      spent *= turns if part.per_micro_batch else 1
      name = f'{part.what} ({part.axis})'
      parts[name] = Estimate(spent, 'modeled')
      total += spent
    return breakdown.CostBreakdown(Estimate(total, 'modeled'), parts)

  def _share(self, flow, node, axes) -> float:
    """Of the bytes of a stage without rows, those that a device has."""
    values = [flow.values[v] for v in {*node.reads, *node.writes}]
    size = sum(value.bytes for value in values)
    kept = sum(self.layout.local(value, axes) for value in values)
    return kept / size if size else 1.0

  def _on_host(self, flow, node, rows) -> breakdown.CostBreakdown:
    device = self.cluster.device
    size = sum(flow.values[v].bytes for v in {*node.reads, *node.writes})
    moved = device.launch_seconds + size / device.host_bandwidth
    spent = self.assumed.host_seconds_per_row * max(rows, 1)
    return breakdown.CostBreakdown(
      Estimate(moved + spent, 'assumed'),
      {
        'from and to the device': Estimate(moved, 'modeled'),
        'on the host': Estimate(spent, 'assumed'),
      },
    )

  def contention(self, stage: str, devices: int, beside: int) -> float:
    """How many times as long a call takes while other devices are busy.

    Args:
      stage: what is called.
      devices: that the call has.
      beside: others of the same processor that are busy as well.
    """
    if stage in self.works and self.works[stage] is None:
      devices = 1  # On the host, wherever its place is.
    alone, together = (
      self.cluster.slowdown(busy, self.measured.contention.get(stage))
      for busy in (devices, devices + beside)
    )
    return together / alone

  # Moves.

  def transfer(
    self,
    flow: graph.Flow,
    value: int,
    source: plan_lib.Placement,
    target: plan_lib.Placement,
  ) -> float:
    """Of a value from place to place; nothing where it is already so.

    Every device of the target receives its share, all copies included, and
    those of the source send as many bytes each.
    """
    if source == target:
      return 0.0
    local = self.layout.local(flow.values[value], target.axes)
    sent = local * len(target.devices) / len(source.devices)
    link = self.cluster.link((*source.devices, *target.devices))
    return link.seconds(max(local, sent))

  def switch(
    self, flow: graph.Flow, value: int, placement: plan_lib.Placement
  ) -> float:
    """Of a value between the memory of devices and of their host."""
    local = self.layout.local(flow.values[value], placement.axes)
    return (
      self.cluster.device.launch_seconds
      + local / self.cluster.device.host_bandwidth
    )

  # Memory.

  def memory(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> float:
    """Bytes that a device of a place needs at its worst moment."""
    return self.explain_memory(flow, chosen, place).total.value

  def explain_memory(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> breakdown.CostBreakdown:
    """What is on a device at its worst moment."""
    key = id(flow), tuple(chosen.stages.items()), tuple(chosen.places)
    if key not in self._places:
      self._places[key] = flow, memory.homes(flow, chosen)
    _, (where, homes) = self._places[key]
    stage, parts = memory.parts(
      flow, chosen, place, where, homes, self.works, self.layout
    )
    total = sum(number.value for number in parts.values())
    during = {f'{name}, during {stage}': n for name, n in parts.items()}
    return breakdown.CostBreakdown(
      Estimate(total, 'modeled'), during if stage else parts
    )
