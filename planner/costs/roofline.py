"""Seconds and bytes of stages on placements, modeled from their work.

The time of a call is its launch, plus the longer of its arithmetic and its
memory traffic, plus the communication between its devices. Measurements of a
stage are used instead. Every number is tagged with its origin.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

from planner import cluster as cluster_lib
from planner.costs import breakdown, cost_model, host_stage
from planner.costs import measured as measured_lib
from planner.costs.measured import Estimate
from planner.costs.mesh import allowed_meshes, collectives, memory
from planner.costs.mesh import layout as layout_lib
from planner.costs.work import NONE, StageWork
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


class Roofline:
  """A cost model of stages, transfers and memory, a `cost_model.Model`.

  Attributes:
    capacity: bytes of a device that plans may use.
    alignment: as in `cost_model.Model`.
  """

  def __init__(
    self,
    flow: graph.Flow,
    works: Mapping[str, StageWork | cost_model.NonlinearWork | None],
    cluster: cluster_lib.Cluster,
    rules: layout_lib.Rules,
    measured: measured_lib.Measurements = measured_lib.Measurements(),
    assumed: Assumptions = Assumptions(),
    evaluation: graph.Flow | None = None,
  ):
    """Takes the work of the stages and the hardware.

    Args:
      flow: as recorded.
      works: the work of each stage, as `count.of_flow`; None for host stages.
      cluster: the hardware.
      rules: mesh axes of each letter, as `sharding.rules.DEFAULT`.
      measured: measured seconds of stages, which replace modeled seconds.
      assumed: efficiencies that are neither measured nor on a data sheet.
      evaluation: a second flow, which is not planned. Meshes of the stages that
        it shares divide its rows, too.
    """
    missing = [name for name in flow.stages if name not in works]
    if missing:
      raise ValueError(
        f'The work of {missing} is missing: count the same flow that is '
        'planned.'
      )
    self.flow, self.works, self.cluster = flow, works, cluster
    self.layout = layout_lib.Layout(rules)
    self.axis_links = collectives.AxisLinks(cluster)
    self.measured, self.assumed = measured, assumed
    self.evaluation = evaluation
    self.capacity = cluster.capacity
    several = cluster.num_devices > cluster.devices_per_node
    self.alignment = cluster.devices_per_node if several else 1
    flows = (flow, evaluation) if evaluation else (flow,)
    self.axes = functools.cache(
      allowed_meshes.Meshes(flows, self.layout, cluster.devices_per_node).of
    )
    self._memo, self._parameters = {}, {}
    self._waiting = host_stage.waiting(flow) if measured.answers else ()
    self._peaks = memory.MemoryModel(
      works, self.layout, cluster.device.platform
    )

  def with_measurements(
    self, measured: measured_lib.Measurements
  ) -> 'Roofline':
    """Returns the same model with other measurements."""
    return Roofline(
      self.flow,
      self.works,
      self.cluster,
      self.layout.rules,
      measured,
      self.assumed,
      self.evaluation,
    )

  # Seconds.

  def seconds(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None,
    remat: str = plan_lib.STORE_ALL,
  ) -> float:
    """Returns the seconds of a call; infinite if its rows cannot be divided."""
    if graph.is_plumbing(node) or not node.rows:
      return self.explain(flow, node, placement, rows, remat).total.value
    there = flow.rows_of(node)
    # Nodes with equally many rows cost the same, unless work is a process.
    linear = isinstance(self.works.get(node.name), StageWork)
    piece = None if linear else node.piece
    key = node.name, there, rows, placement, piece, remat
    if key not in self._memo:
      found = self.explain(flow, node, placement, rows, remat)
      self._memo[key] = found.total.value
    return self._memo[key]

  def explain(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    rows: int | None = None,
    remat: str = plan_lib.STORE_ALL,
  ) -> breakdown.CostBreakdown:
    """Returns the seconds of a call, by component.

    Args:
      flow: a cut flow; a piece has the rows of what it reads.
      node: a node of that flow.
      placement: its placement.
      rows: rows of a micro-batch; None for all.
      remat: activations that its backward pass computes again, as `plan.Plan`.
    """
    if graph.is_plumbing(node):
      return self._moved(flow, node, placement)
    there = flow.rows_of(node)
    rows = rows or there
    where = self.layout, flow, node, placement.axes
    if there and (there % rows or not allowed_meshes.can_share(*where, rows)):
      return breakdown.CostBreakdown(Estimate(math.inf, 'modeled'), {})
    turns = there / rows if there else 1
    found = self._under(flow, node, placement, rows, turns, remat)
    factor = self.measured.factors.get(node.name, 1.0)
    if factor == 1.0:
      return found
    return breakdown.scaled(
      found,
      Estimate(factor, 'measured'),
      'times, corrected by a run',
      found.total.tag,
    )

  def _under(self, *call_and_remat):
    """Returns seconds under a policy; measurements store all activations."""
    *call, remat = call_and_remat
    if remat == plan_lib.STORE_ALL:
      return self._measured(*call)
    again = self._modeled(*call, remat)
    if self.measured.elsewhere(call[1].name) is None:
      return again
    stored = self._modeled(*call).total.value
    return breakdown.scaled(
      self._measured(*call),
      Estimate(again.total.value / stored, 'modeled'),
      'times, as activations are computed again',
    )

  def _measured(self, flow, node, placement, rows, turns):
    """Returns measured seconds, else modeled ones scaled by a measurement.

    The scale is measured over modeled seconds at the nearest measured rows.
    """
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
      # At the same number of rows a device, if that was measured.
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
    """Returns the seconds of an added node, which only moves bytes."""
    device = self.cluster.device
    values = [flow.values[v] for v in (*node.reads, *node.writes)]
    size = sum(self.layout.local(value, placement.axes) for value in values)
    spent = size / (device.memory_bandwidth * self.assumed.memory_efficiency)
    parts = {
      'launch': Estimate(device.launch_seconds, 'assumed'),
      'traffic': Estimate(spent, 'modeled'),
    }
    parts |= self._sent(self._parameters_of(flow, node), NONE, placement)
    total = sum(number.value for number in parts.values())
    return breakdown.CostBreakdown(Estimate(total, 'modeled'), parts)

  def _sent(self, parameters, done, placement, passes=1.0, turns=1.0):
    """Returns the exposed seconds of each kind of communication of a call."""
    spent = self.axis_links.seconds(parameters, done, placement, passes, turns)
    exposed = self.assumed.exposed_communication
    return {what: Estimate(exposed * t, 'modeled') for what, t in spent.items()}

  def _modeled(
    self, flow, node, placement, rows, turns, remat=plan_lib.STORE_ALL
  ):
    on_host = self.works[node.name] is None
    others = 0 if on_host else len(placement.devices) - 1
    slower = self.contention(node.name, 1, others)
    found = self._alone(flow, node, placement, rows, turns, remat)
    if slower == 1.0:
      return found
    known = node.name in self.measured.contention
    times = Estimate(slower, 'measured' if known else 'assumed')
    return breakdown.scaled(found, times, 'times, as devices share cores')

  def _alone(self, flow, node, placement, rows, turns, remat):
    """Returns modeled seconds without contention between devices."""
    call = self.works[node.name]
    if call is None:
      return self._on_host(flow, node, rows * turns)
    if not isinstance(call, StageWork):
      parts = call.seconds(self, flow, node, placement, rows)
      tags = {number.tag for number in parts.values()}
      tag = 'assumed' if 'assumed' in tags else 'modeled'
      total = sum(number.value for number in parts.values())
      return breakdown.CostBreakdown(Estimate(total, tag), parts)
    device, assumed, axes = self.cluster.device, self.assumed, placement.axes
    parameters = self._parameters_of(flow, node)
    # Chunks of logits have a limit a device, so its own rows count.
    where = self.layout, flow, node, axes
    local_rows = rows / allowed_meshes.row_ways(*where, rows)
    call = call.near(local_rows).under(remat)
    done = collectives.divided_work(call, local_rows, axes, self.layout)
    whole = call.exactly(local_rows)
    share = 1 / parameters.ways(axes) if rows else self._share(flow, node, axes)
    own = whole.times(share)
    products = sum(x / device.peak(kind) for kind, x in own.matmul.items())
    arithmetic = products / assumed.matmul_efficiency
    arithmetic += own.other_flops / (
      device.vector_flops * assumed.vector_efficiency
    )
    traffic = own.bytes_moved / (
      device.memory_bandwidth * assumed.memory_efficiency
    )
    # Each device launches every kernel, on its share of the numbers.
    gaps = whole.kernels * device.kernel_gap_seconds
    parts = {
      'launch': Estimate(device.launch_seconds, 'assumed'),
      'gaps between kernels': Estimate(turns * gaps, 'assumed'),
      'arithmetic': Estimate(turns * arithmetic, 'modeled'),
      'traffic': Estimate(turns * traffic, 'modeled'),
    }
    total = device.launch_seconds + turns * (gaps + max(arithmetic, traffic))
    passes = max(1.0, whole.passes)
    sent = self._sent(parameters, done, placement, passes, turns)
    total += sum(number.value for number in sent.values())
    return breakdown.CostBreakdown(Estimate(total, 'modeled'), parts | sent)

  def _parameters_of(self, flow, node) -> collectives.Parameters:
    """Returns the parameters of a node, memoized by the node's identity."""
    if id(node) not in self._parameters:
      found = collectives.Parameters(flow, node, self.layout)
      # With the node, so that no other node gets its id.
      self._parameters[id(node)] = node, found
    return self._parameters[id(node)][1]

  def _share(self, flow, node, axes) -> float:
    """Returns the fraction of a stage's bytes that a device holds."""
    values = [flow.values[v] for v in {*node.reads, *node.writes}]
    size = sum(value.bytes for value in values)
    kept = sum(self.layout.local(value, axes) for value in values)
    return kept / size if size else 1.0

  def _on_host(self, flow, node, rows) -> breakdown.CostBreakdown:
    device = self.cluster.device
    size = sum(flow.values[v].bytes for v in {*node.reads, *node.writes})
    moved = device.launch_seconds + size / device.host_bandwidth
    guess = self.assumed.host_seconds_per_row
    return host_stage.seconds(node.stage, rows, moved, self.measured, guess)

  def contention(self, stage: str, devices: int, beside: int) -> float:
    """Returns how many times as long a call takes while others are busy.

    Args:
      stage: the stage of the call.
      devices: number of devices of the call.
      beside: number of other busy devices of the same processor.
    """
    if stage in self._waiting:
      return 1.0
    if stage in self.works and self.works[stage] is None:
      devices = 1  # It runs on the host.
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
    """Returns the seconds of a transfer; zero if source and target are equal.

    Each device of the target receives its shards, copies included, and the
    devices of the source send as many bytes in total.
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
    """Returns the seconds of moving a value between device and host memory."""
    local = self.layout.local(flow.values[value], placement.axes)
    spent = self.cluster.host_seconds(local, len(placement.devices))
    return spent * self.measured.factors.get(measured_lib.HOST_MOVES, 1.0)

  # Memory.

  def memory(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> Mapping[str, float]:
    """Returns the bytes on a device of a place while each of its nodes runs."""
    return self._peaks.needs(flow, chosen, place)

  def least_memory(
    self,
    flow: graph.Flow,
    node: graph.Node,
    placement: plan_lib.Placement,
    execution: plan_lib.Execution,
    pieces: int,
  ) -> float:
    """Returns the bytes of a stage itself and of the state that it reads."""
    return self._peaks.least(flow, node, placement.axes, execution, pieces)

  def explain_memory(
    self,
    flow: graph.Flow,
    chosen: plan_lib.Plan,
    place: str,
    stage: str | None = None,
  ) -> breakdown.CostBreakdown:
    """Returns bytes on a device at the peak of a place or stage, by part."""
    stage, parts = self._peaks.parts(flow, chosen, place, stage)
    total = sum(number.value for number in parts.values())
    during = {f'{name}, during {stage}': n for name, n in parts.items()}
    return breakdown.CostBreakdown(
      Estimate(total, 'modeled'), during if stage else parts
    )
