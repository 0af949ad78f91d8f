"""A place: devices seen as a mesh, and how values lie and stages run on it."""

from collections.abc import Container, Mapping, Sequence
import contextlib
import dataclasses
import math
import threading
import types
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from planner.ir import graph as graph_lib
from planner.ir import groups
from planner.ir import plan as plan_lib
from rlinf_jax.runtime.places import lease as lease_lib
from rlinf_jax.runtime.places import micro_batch as micro_batch_lib
from rlinf_jax.runtime.places import whole_weights
from sharding import mesh as mesh_lib
from sharding import multihost, offload, streaming
from sharding import rules as rules_lib


class Place:
  """A `base.Place` on devices of this process.

  On devices that are not here, stages can be compiled but not called.

  A place may span processes. Then each process has one of these, after
  `jax.distributed` has made their devices one list, and all of them make the
  same calls in the same order.

  Compiled calls are cached by stage, layouts and donations, so that a stage is
  compiled once however often a flow calls it.

  Attributes:
    name: of the place.
    mesh: of its devices; None for a single device without axes.
    device: its first device.
    lease: the right to its devices, if other places share them.
  """

  def __init__(
    self,
    name: str,
    placement: plan_lib.Placement,
    micro_batch: dict[str, int],
    rules: rules_lib.Rules = rules_lib.DEFAULT,
    lease: lease_lib.Lease | None = None,
    available: Sequence[jax.Device] | None = None,
    remat: Mapping[str, str] = types.MappingProxyType({}),
    compiler_options: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
      {}
    ),
  ):
    """Makes the mesh.

    Args:
      name: of the place.
      placement: its devices and mesh axes.
      micro_batch: rows that a stage takes at once, by stage.
      rules: from dimension letters to mesh axes.
      lease: the right to its devices, if other places share them.
      available: the devices that `placement` numbers; None for those of this
        process.
      remat: activations stored for the backward pass, by stage, as in
        `plan_lib.Plan`.
      compiler_options: of XLA, by stage, as in `plan_lib.Plan`; those of
        `whole_weights` for a stage that is not named.

    Raises:
      ValueError: if one of the devices is missing.
    """
    devices = placement.devices
    owner = 'this process has' if available is None else 'there are'
    available = jax.devices() if available is None else available
    missing = [i for i in devices if i >= len(available)]
    if missing:
      raise ValueError(
        f'Place {name!r} wants device {missing[0]}, and {owner} '
        f'{len(available)}: name other devices, or start with more.'
      )
    self.name, self.micro_batch, self.rules = name, micro_batch, rules
    self.lease, self.remat = lease, remat
    self.compiler_options = compiler_options
    self.mesh = None
    self.device = available[devices[0]]
    if placement.axes:
      self.mesh = mesh_lib.mesh(
        [available[i] for i in devices], dict(placement.axes)
      )
    self.calls = {}
    self.locks = {}

  def layout(self, value: graph_lib.Value, is_hosted: bool = False):
    """The sharding of a value on this place while a stage uses it.

    Args:
      value: the value.
      is_hosted: whether it stays in the memory of the host.
    """
    if is_hosted:
      return offload.on_host(self.layout(value))
    if self.mesh is None:
      return SingleDeviceSharding(self.device)
    try:
      spec = rules_lib.partition_spec(
        self.mesh, value.letters, value.shape, self.rules
      )
    except ValueError as error:
      raise ValueError(
        f'{value.name} on place {self.name!r}: {error}'
      ) from None
    return NamedSharding(self.mesh, spec)

  def check_node(self, flow: graph_lib.Flow, node: graph_lib.Node):
    """Raises ValueError if devices cannot share a node's rows or its model.

    Devices need equally many rows each, see `planner.ir.groups.ways`. An
    engine's model is divided evenly, on devices of this process.
    """
    if self.mesh is None:
      return
    if node.stage.host:
      self._check_engine(node.stage)
      return
    if not node.rows:
      return
    size = self.micro_batch.get(node.name, flow.rows_of(node))
    group, devices = node.stage.group_size, self._row_ways
    ways = groups.ways(flow, node, size, devices)
    if ways != 1:
      for v in node.rows:
        value = flow.values[v]
        self.layout(dataclasses.replace(value, shape=(size, *value.shape[1:])))
    if ways is None:
      raise ValueError(
        f'Stage {node.name} takes {size} rows at once, which are '
        f'{size // group} groups of {group}, and the {devices} devices that '
        f'share rows on place {self.name!r} cannot have as many each, of '
        f'{groups.wanted(node.stage)}: make it a multiple of '
        f'{group * devices} rows, or give these devices to the mesh axis '
        "'tensor'."
      )

  @property
  def _row_ways(self) -> int:
    """The number of devices over which rows are sharded."""
    axes = rules_lib.mesh_axes(self.mesh, 'B', self.rules) if self.mesh else ()
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def _check_engine(self, stage):
    """Raises ValueError if an engine outside JAX cannot use these devices."""
    if stage.engine is None or stage.engine.ranks is None:
      return
    mine = jax.process_index()
    away = [d for d in self.mesh.devices.flat if d.process_index != mine]
    if away:
      raise ValueError(
        f'Stage {stage.name} has an engine outside JAX, and place '
        f'{self.name!r} has devices of other processes, such as {away[0]}: '
        'give the stage a place whose devices are of one process.'
      )
    rows = rules_lib.mesh_axes(self.mesh, 'B', self.rules)
    shape = {a: n for a, n in self.mesh.shape.items() if a not in rows}
    if (ranks := math.prod(shape.values())) not in stage.engine.ranks:
      raise ValueError(
        f'Stage {stage.name} has an engine outside JAX, whose model can be '
        f'divided between {stage.engine.ranks} devices, and the '
        f'mesh of place {self.name!r} divides it between {ranks} ({shape}): '
        "give devices to the mesh axis 'data' instead, which hold copies."
      )

  def ambient(self):
    """A context in which this mesh is JAX's current one."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def put(self, value: graph_lib.Value, x):
    """`x` with the layout of `value`."""
    return multihost.put(x, self.layout(value))

  def layout_at_rest(self, value: graph_lib.Value):
    """The sharding of a value that no stage is about to read.

    It is in host memory if another place may hold the devices.
    """
    return self.layout(value, self.lease is not None)

  def store(self, value: graph_lib.Value, x):
    """`x` with the layout at rest of `value`."""
    stored = multihost.put(x, self.layout_at_rest(value))
    return jax.block_until_ready(stored) if self.lease else stored

  def compile(
    self,
    flow: graph_lib.Flow,
    node: graph_lib.Node,
    donate: Container[int] = (),
    passed: Container[int] | None = None,
    streamed: Mapping[int, int] = types.MappingProxyType({}),
    rounded: Mapping[int, int] = types.MappingProxyType({}),
  ):
    """A function from the leaves that `node` reads to those that it writes.

    Args:
      flow: the flow that the node belongs to.
      node: the call of a stage.
      donate: numbers of values whose memory the call may reuse.
      passed: numbers of values that instructions other than calls read or
        write; None for all.
      streamed: values that it reads in host memory, and what it writes there in
        place of each.
      rounded: what this place holds in place of values that it reads.

    Returns:
      The compiled call, or a `HostCall` for a host stage.
    """
    stage = node.stage
    if stage.host:
      alone = self.mesh is None and self.lease is None and passed is not None
      as_numpy = [alone and v not in passed for v in node.writes]
      return HostCall(self, flow, node, as_numpy)
    reads = [flow.values[rounded.get(v, v)] for v in node.reads]
    writes = [flow.values[v] for v in node.writes]
    donated = self._donatable(flow, node, donate, streamed, rounded)
    pairs = {
      node.reads.index(v): node.writes.index(w) for v, w in streamed.items()
    }
    key = (
      stage,
      node.in_tree,
      tuple((v.shape, v.dtype, v.letters) for v in reads + writes),
      donated,
      tuple(pairs.items()),
    )
    # A thread that wants what another is compiling waits for it.
    with self.locks.setdefault(key, threading.Lock()):
      if key not in self.calls:
        fn = self._function(flow, node)
        options = self._options(flow, node)
        self.calls[key] = self._compiled(
          node, fn, reads, writes, donated, pairs, options
        )
    return self.calls[key]

  def _function(self, flow, node):
    """The function of a node, in micro-batches and on devices as planned."""
    stage, fn = node.stage, node.stage.run
    # `stage.run` is jitted: what the flow has traced is not traced again.
    if graph_lib.is_plumbing(node):
      return fn
    if stage.name in self.remat:
      fn = stage.run_with_remat(self.remat[stage.name])
    rows = self.micro_batch.get(stage.name)
    size, ways = rows or flow.rows_of(node), self._row_ways
    is_whole = size and ways > 1 and groups.ways(flow, node, size, ways) == 1
    if rows:
      shard = (lambda x: x) if is_whole else self._shard_rows
      fn = micro_batch_lib.in_micro_batches(stage, rows, shard, fn)
    if is_whole:
      all_ = PartitionSpec()
      fn = jax.shard_map(fn, in_specs=all_, out_specs=all_, check_vma=False)
    return fn

  def _options(self, flow, node) -> dict[str, Any]:
    """The compiler options of a stage: those of its plan, or the default."""
    own = self.compiler_options.get(node.name)
    if own is not None:
      return dict(own)
    return dict(
      whole_weights.options(self.device, self.mesh, flow, node, self.rules)
    )

  def _compiled(self, node, fn, reads, writes, donated, pairs, options):
    stage = node.stage

    def call(*leaves):
      if node.in_tree is not None:
        leaves = jax.tree.unflatten(node.in_tree, leaves)
      return jax.tree.leaves(fn(*leaves))

    layouts = [
      [self.layout(v, i in some) for i, v in enumerate(values)]
      for values, some in ((reads, pairs), (writes, {*pairs.values()}))
    ]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in reads]
    if pairs:
      platform = self.device.platform
      call = streaming.streamed(
        call, shapes, layouts[0], pairs, donated, platform
      )
    call.__name__ = stage.name  # Shown by profilers.
    jitted = jax.jit(
      call,
      in_shardings=layouts[0],
      # The program says where the results of an unknown layout are.
      out_shardings=[x if offload.is_known(x) else None for x in layouts[1]],
      donate_argnums=donated,
    )
    # Models constrain the sharding of rows by the mesh, and choose kernels.
    with self.ambient() if self.mesh else mesh_lib.on_device(self.device):
      lowered = jitted.lower(*shapes)
    if stage.name in self.remat:
      self._check_remat(stage)
    outputs = [(x.shape, x.dtype) for x in jax.tree.leaves(lowered.out_info)]
    if outputs != [(v.shape, v.dtype) for v in writes]:
      raise ValueError(
        f'Stage {stage.name} makes something else of a piece of its rows than '
        f'of all of them ({writes[0].name} and what follows): its sums must '
        'have one shape. Cut the batch in fewer pieces.'
      )
    try:
      return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
      if 'No such compile option' not in str(error):
        raise
      raise ValueError(
        f'Stage {stage.name} is to be compiled with {options}, and XLA does '
        f'not know one of these options ({error}): name others for the stage '
        "in the plan's compiler_options; {} gives it XLA's defaults."
      ) from None

  def _check_remat(self, stage):
    """Raises ValueError if no model of a traced stage reads the policy."""
    if not stage.reads_remat:
      raise ValueError(
        f'The plan gives stage {stage.name} remat '
        f'{self.remat[stage.name]!r}, and no model of the stage leaves it to '
        "the plan: bind the model's remat to 'auto', such as "
        "huggingface.policy.remat, or leave the stage out of the plan's remat."
      )

  def _shard_rows(self, x):
    """Shards the rows of `x[micro-batch, row, ...]` over the devices."""
    if self.mesh is None:
      return x
    letters = ('', 'B') + ('',) * (x.ndim - 2)
    spec = rules_lib.partition_spec(self.mesh, letters, x.shape, self.rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def _donatable(
    self, flow, node, donate, streamed, rounded
  ) -> tuple[int, ...]:
    """Positions of donated values whose memory some output can reuse."""

    def kind_of(v, hosted):
      value = flow.values[v]
      return value.shape, value.dtype, self.layout(value, v in hosted)

    outputs = [kind_of(v, streamed.values()) for v in node.writes]
    positions = []
    for i, v in enumerate(node.reads):
      kind = kind_of(rounded.get(v, v), streamed)
      if v in donate and math.prod(kind[0]) > 1 and kind in outputs:
        outputs.remove(kind)
        positions.append(i)
    return tuple(positions)


class HostCall(NamedTuple):
  """A call of a host stage, whose results are put on a place.

  Compiled calls transfer many NumPy arrays at once faster than `put` does one
  by one. Results that only compiled calls read therefore stay NumPy arrays.

  Attributes:
    place: where the results go.
    flow: the flow that the node belongs to.
    node: the call.
    as_numpy: for each result, whether it may stay a NumPy array.
  """

  place: Place
  flow: graph_lib.Flow
  node: graph_lib.Node
  as_numpy: list[bool]

  def __call__(self, *leaves):
    return self.finish(self.start(*leaves), *leaves)

  def start(self, *leaves):
    """Starts the call, which `finish` waits for."""
    return self.node.stage.start(*jax.tree.unflatten(self.node.in_tree, leaves))

  def finish(self, started, *leaves):
    """Waits for a call that was started; returns the leaves of its results."""
    args = jax.tree.unflatten(self.node.in_tree, leaves)
    results = jax.tree.leaves(self.node.stage.finish(started, *args))
    return [
      x
      if as_numpy and isinstance(x, np.ndarray)
      else self.place.put(self.flow.values[v], x)
      for v, x, as_numpy in zip(
        self.node.writes, results, self.as_numpy, strict=True
      )
    ]
