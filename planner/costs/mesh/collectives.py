"""Models the communication between the devices of a mesh during a stage.

Parameters that are sharded over an axis of rows are gathered before use, and
their gradients are reduce-scattered; other gradients are all-reduced among the
devices that hold copies; partial sums over a sharded dimension are all-reduced
at once. Collectives are rings: to gather n shards, a device receives n - 1.
Rows that change devices, as those of minibatches do, are counted in `routing`.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

from planner import cluster as cluster_lib
from planner.costs.mesh import layout as layout_lib
from planner.costs.mesh import routing
from planner.costs.work import StageWork, Work
from planner.ir import graph
from planner.ir import plan as plan_lib


def item_bytes(dtype: str) -> float:
  """Returns the bytes of a number of a named type: 2 for bfloat16."""
  bits = re.search(r'\d+', dtype)
  return int(bits[0]) / 8 if bits else 1.0


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of collective communication.

  Attributes:
    what: a description for people.
    axis: the mesh axis along which devices communicate.
    size: bytes that each device sends.
    messages: number of consecutive messages.
    per_micro_batch: whether each micro-batch needs it, or each call.
    per_pass: whether each packed row needs it, or all of them together.
  """

  what: str
  axis: str
  size: float
  messages: float
  per_micro_batch: bool
  per_pass: bool = True

  def times(self, passes: float, turns: float) -> float:
    """Returns how often it happens.

    Args:
      passes: packed rows of a micro-batch.
      turns: micro-batches of a call.
    """
    of_rows = passes if self.per_pass else 1.0
    return of_rows * (turns if self.per_micro_batch else 1.0)


class Parameters:
  """The arguments without rows of a node, and their layout on a mesh.

  Attributes:
    read: values without rows that the node reads.
    updated: those of them that may differ from step to step.
    gradients: sums that the node writes and that are laid out as parameters.
    depth: number of stacked layers, at least one.
    moved: `axes, scatters_sums -> bytes, messages` of rows that change devices;
      None if the node does not only move rows.
  """

  def __init__(self, flow: graph.Flow, node: graph.Node, layout):
    self.layout = layout
    reads = {}
    for i, v in enumerate(node.reads):
      if v not in node.rows:
        reads.setdefault(v, []).append(i)
    self.read = [flow.values[v] for v in reads]
    self.updated = [flow.values[v] for v in reads if v not in flow.constants]
    self.gradients = []
    if node.stage.grain == 'sum':
      made = [flow.values[v] for v in node.writes]
      self.gradients = [v for v in made if self._is_lettered(v)]
    stacked = [
      v.shape[0] for v in self.read if v.letters[:1] == ('',) and any(v.letters)
    ]
    self.depth = max(stacked, default=1)
    self.moved = None
    if graph.is_plumbing(node) or graph.is_routing(node):
      self.moved = functools.partial(routing.sent, flow, node, layout)
    # A search asks for many micro-batches of every mesh.
    self.ways = functools.cache(self._ways)
    self.gathered = functools.cache(self._gathered)
    trains = bool(self.gradients)
    # Of which arguments a value is; none where it has a gradient itself.
    self._positions = [
      () if trains and v not in flow.constants else tuple(some)
      for v, some in reads.items()
    ]

  def _is_lettered(self, value) -> bool:
    return any(letter not in ('', 'B') for letter in value.letters)

  def used(self, value, axes) -> tuple[str, ...]:
    return self.layout.shared(value.letters, value.shape, axes) or ()

  def gathers_whole(self, axes) -> bool:
    """Whether a gradient on a mesh is compiled so that it gathers weights.

    The devices share its weights along axes of rows alone. Otherwise, a product
    in steps also hides what devices of other axes add up.
    """
    several = [axis for axis, n in axes if n > 1]
    used = {a for value in self.gradients for a in self.used(value, axes)}
    is_shared = not used.isdisjoint(several)
    return is_shared and all(a in self.layout.of_rows for a in several)

  def _ways(self, axes) -> int:
    """Returns how many devices share the work: those of axes without rows."""
    used = {axis for value in self.read for axis in self.used(value, axes)}
    return math.prod(
      n for a, n in axes if a in used and a not in self.layout.of_rows
    )

  def share(self, axes) -> float:
    """Returns the fraction of all their bytes that a device holds."""
    total = sum(value.bytes for value in self.read)
    kept = sum(self.layout.local(value, axes) for value in self.read)
    return kept / total if total else 1.0

  def _gathered(
    self, axes, item: float, axis: str | None = None, reads=()
  ) -> tuple[float, float, float]:
    """Returns the bytes that a device gathers over `axis`, or all axes of rows.

    The second number is those of layers, and the third those that the backward
    pass gathers again: the embedding and the output layer stay until then.
    Keys and values of rows stay on the devices of these rows.
    Frozen parameters are gathered as often as they are read: in the forward
    pass alone where no gradient passes them, and never where rows of them are
    looked up. So are all parameters of a stage without gradients.

    Args:
      axes: axes of the mesh.
      item: bytes of a number in the type of the arithmetic.
      axis: the axis to gather over; None for all axes of rows.
      reads: the items of `Work.reads`; empty if they are not known.
    """
    sizes, known = dict(axes), dict(reads)
    size = layers = again = 0.0
    for value, positions in zip(self.read, self._positions, strict=True):
      if value.letters[:1] == ('B',) and self._is_lettered(value):
        continue
      times = 2.0
      if known and positions:
        times = sum(known.get(i, 0.0) for i in positions)
      once = times if known and not self.gradients else min(1.0, times)
      used = self.used(value, axes)
      rows = [a for a in used if a in self.layout.of_rows]
      if rows and (axis is None or axis in rows):
        others = math.prod(sizes[a] for a in used if a not in rows)
        bytes_ = math.prod(value.shape) * item / others
        size += once * bytes_
        if 'V' not in value.letters:
          layers += once * bytes_
          again += min(1.0, max(0.0, times - 1.0)) * bytes_
    return size, layers, again

  def gathered_as_they_are(self, axes, item: float) -> float:
    """Returns the bytes that decoding has of what it gathers and rounds not.

    These are the embedding and the output layer, where they have the type of
    the arithmetic already. It reads copies of layers, and nothing else of
    parameters that are rounded.

    Args:
      axes: axes of the mesh.
      item: bytes of a number in the type of the arithmetic.
    """
    sizes, size = dict(axes), 0.0
    for value in self.read:
      used = self.used(value, axes)
      rows = self.layout.of_rows
      is_narrow = value.bytes <= item * math.prod(value.shape)
      if 'V' in value.letters and is_narrow and {*used} & {*rows}:
        size += value.bytes / math.prod(sizes[a] for a in used if a not in rows)
    return size

  def transposed(self, axes) -> float:
    """Returns the bytes of parameters that XLA copies with another layout.

    GPUs gather along the leading dimension. Where devices share a later one of
    a layer, all layers are transposed before the loop that gathers them, and
    stay until the backward pass has ended.
    """
    total = 0.0
    for value in self.read:
      rows = set(self.used(value, axes)).intersection(self.layout.of_rows)
      at = [
        i
        for i, letter in enumerate(value.letters)
        if rows.intersection(self.layout.axes_of(letter))
      ]
      if value.letters[:1] == ('',) and at and at[0] > 1:
        total += self.layout.local(value, axes)
    return total


def divided_work(
  call: StageWork, rows: float, axes: layout_lib.Axes, layout: layout_lib.Layout
) -> Work:
  """Returns the work of a device's rows, whose arrays others divide with it.

  Args:
    call: the segment of a stage's work for a device's rows, under a remat
      policy.
    rows: of a micro-batch, on one device.
    axes: axes of the mesh; those without rows divide the arrays.
    layout: says which.
  """
  return call.on(layout.without_rows(axes), layout).at(rows)


def communication(
  parameters: Parameters,
  done: Work,
  axes: layout_lib.Axes,
  cluster: cluster_lib.Cluster,
) -> Iterator[Collective]:
  """Yields the communication between the devices of a mesh during a node.

  Args:
    parameters: the parameters of the node.
    done: the work of one micro-batch, for the rows of a device.
    axes: axes of the mesh.
    cluster: the devices.
  """
  layout = parameters.layout
  if parameters.moved:
    size, messages = parameters.moved(axes, cluster.scatters_sums)
    if size:
      # All axes of rows take part; groups along the first are the widest.
      axis = next(axis for axis, _ in axes if axis in layout.of_rows)
      yield Collective('move rows', axis, size, messages, True)
    return
  for axis, n in axes:
    if axis in layout.of_rows:
      yield from _gathers(parameters, done, axes, axis, cluster)
      yield from _scatters(parameters, done, axes, axis, cluster)
      continue
    sums = [
      some for x, some in done.partial.items() if axis in layout.axes_of(x)
    ]
    if sums:
      count, size, scattered = map(sum, zip(*sums, strict=True))
      if not cluster.scatters_sums:
        size += scattered
      # These are counted with the trips of loops.
      size = 2 * (n - 1) / n * size
      yield Collective('add up parts', axis, size, count, True, False)


def _is_windowed(parameters, axes, cluster) -> bool:
  """Whether products with weights that devices share are computed in steps."""
  whole = cluster.gathers_weights and parameters.gathers_whole(axes)
  return cluster.windows_products and not whole


def _windowed_parts(n: int) -> int:
  """Returns the parts that each of n devices sends during a product in steps.

  XLA goes round both ways, two steps to a turn of its loop. The loop of up to
  four devices has one turn, of which it drops what no step needs.
  """
  return n + 1 if n > 4 else n - 1


def _item_bytes(done: Work) -> float | None:
  """Returns the bytes of a number of most products; None without products."""
  kind = max(done.matmul, key=done.matmul.get, default=None)
  return item_bytes(kind) if kind else None


def _gathers(parameters, done, axes, axis, cluster) -> Iterator[Collective]:
  """Yields the gathers of parameters over an axis of rows."""
  item, n = _item_bytes(done), dict(axes)[axis]
  if not item:
    return
  # Decoding gathers all of them before its loop. Packed rows count by pass.
  is_known = not done.turns and (parameters.gradients or not done.passes)
  reads = tuple(sorted(done.reads.items())) if is_known else ()
  size, layers, again = parameters.gathered(axes, item, axis, reads)
  if not size:
    return
  passes = 2 if parameters.gradients else 1  # The backward pass gathers again.
  # That of packed rows begins with a forward pass of its own.
  times = passes if done.passes else 1
  sent = (n - 1) * (times * size + (passes - 1) * again)
  if _is_windowed(parameters, axes, cluster) and not done.turns:
    # The backward pass gathers for two products.
    sent += (_windowed_parts(n) - (n - 1)) * times * layers
  messages = (times + passes - 1) * parameters.depth
  yield Collective('gather parameters', axis, sent / n, messages, True)


def _scatters(parameters, done, axes, axis, cluster) -> Iterator[Collective]:
  """Yields the sums of gradients over an axis of rows."""
  layout, item, n = parameters.layout, _item_bytes(done), dict(axes)[axis]
  twice = 1 if cluster.scatters_sums else 2
  scattered = added = 0.0
  for value in parameters.gradients:
    local = layout.local(value, axes)
    is_copied = axis not in parameters.used(value, axes)
    # Products of layers have the type of the arithmetic. Devices with copies
    # add up what a loop over packed rows has summed in the type of the sums.
    is_wide = value.letters[:1] != ('',) or item is None
    is_wide |= is_copied and done.passes > 0
    if not is_wide:
      local *= min(1.0, item * math.prod(value.shape) / value.bytes)
    if is_copied:
      added += 2 * (n - 1) / n * local
    elif is_wide:
      scattered += twice * (n - 1) * local
    else:
      windowed = _is_windowed(parameters, axes, cluster)
      parts = _windowed_parts(n) if windowed else twice * (n - 1)
      scattered += parts * local
  if scattered:
    depth = parameters.depth
    yield Collective('scatter gradients', axis, scattered, depth, True)
  if added:
    # XLA does so in the loop over micro-batches, not after it.
    yield Collective('add up gradients', axis, added, 1, True)


class AxisLinks:
  """The links along the mesh axes of placements."""

  def __init__(self, cluster: cluster_lib.Cluster):
    self.cluster = cluster
    self.link = functools.lru_cache(None)(self._link)

  def seconds(
    self, parameters: Parameters, done: Work, placement, passes=1.0, turns=1.0
  ) -> dict[str, float]:
    """Returns the seconds of each kind of communication during a node.

    Args:
      parameters: as in `communication`.
      done: likewise.
      placement: the devices and their mesh.
      passes: as in `Collective.times`.
      turns: likewise.
    """
    return {
      f'{part.what} ({part.axis})': part.times(passes, turns)
      * self.link(placement, part.axis).seconds(part.size, part.messages)
      for part in communication(parameters, done, placement.axes, self.cluster)
    }

  def _link(self, placement: plan_lib.Placement, axis: str):
    """Returns the link of the slowest group of devices along an axis.

    A ring through several nodes uses as many ports of a node as it has devices
    there.
    """
    there, worst = self.cluster, None
    for group in layout_lib.along(placement.devices, placement.axes, axis):
      nodes = {}
      for device in group:
        node = device // there.devices_per_node
        nodes[node] = nodes.get(node, 0) + 1
      link = there.intra_node
      if len(nodes) > 1:
        ports = min(nodes.values()) * there.inter_node.bandwidth
        link = cluster_lib.Link(
          there.inter_node.latency_seconds,
          min(there.intra_node.bandwidth, ports),
        )
      if worst is None or link.bandwidth < worst.bandwidth:
        worst = link
    return worst
