"""A place: devices seen as a mesh, and how values lie and stages run on it."""

from collections.abc import Container
import contextlib
import dataclasses
import math
import threading
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
import numpy as np

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import lease as lease_lib
from rlinf_jax.runtime import micro_batch
from sharding import mesh as mesh_lib
from sharding import offload, span
from sharding import rules as rules_lib


class Place:
  """One place of a plan on this process's devices.

  Where processes share it, this is the part of one of them, `jax.distributed`
  has made their devices one list, and each of them makes the same calls.

  Compiled calls are kept by stage, layouts and donations, so that a stage which
  a flow calls often is compiled once.
  """

  def __init__(
    self,
    name: str,
    placement: plan_lib.Placement,
    micro_batch: dict[str, int],
    rules: rules_lib.Rules = rules_lib.DEFAULT,
    lease: lease_lib.Lease | None = None,
  ):
    """Takes devices of this process.

    Args:
      name: of the place.
      placement: its devices and their mesh.
      micro_batch: rows that each stage takes at once, by stage.
      rules: from letters to mesh axes.
      lease: by which it has its devices, if it shares them.
    """
    devices, there = placement.devices, jax.devices()
    missing = [i for i in devices if i >= len(there)]
    if missing:
      raise ValueError(
        f'Place {name!r} wants device {missing[0]}, and this process has '
        f'{len(there)}: name other devices, or start with more.'
      )
    self.name, self.micro_batch, self.rules = name, micro_batch, rules
    self.lease = lease
    self.mesh = None
    self.device = there[devices[0]]
    if placement.axes:
      self.mesh = mesh_lib.mesh(
        [there[i] for i in devices], dict(placement.axes)
      )
    self.calls = {}
    self.locks = {}

  def layout(self, value: graph_lib.Value):
    """How this place holds a value."""
    if self.mesh is None:
      return SingleDeviceSharding(self.device)
    try:
      spec = rules_lib.spec(self.mesh, value.letters, value.shape, self.rules)
    except ValueError as error:
      raise ValueError(
        f'{value.name} on place {self.name!r}: {error}'
      ) from None
    return NamedSharding(self.mesh, spec)

  def check_rows(self, flow: graph_lib.Flow, node: graph_lib.Node):
    """Refuses rows at a time that the devices cannot share in whole groups.

    XLA would take a group split between devices, and gives wrong numbers for it
    (0.10.2: an embedding's gradient, where groups are fewer than devices).
    """
    if node.stage.host or self.mesh is None:
      return
    group = node.stage.group_size
    axes = rules_lib.axes_of(self.mesh, 'B', self.rules)
    devices = math.prod(self.mesh.shape[axis] for axis in axes)
    for v in node.rows:
      value = flow.values[v]
      size = self.micro_batch.get(node.name, value.shape[0])
      self.layout(dataclasses.replace(value, shape=(size, *value.shape[1:])))
      if (size // group) % devices:
        raise ValueError(
          f'Stage {node.name} takes {size} rows at once, which are '
          f'{size // group} groups of {group}, and the {devices} devices that '
          f'share rows on place {self.name!r} cannot have as many each: make '
          f'it a multiple of {group * devices} rows, or give these devices to '
          "the mesh axis 'tensor'."
        )

  def ambient(self):
    """A context in which checkpoints are read straight to this place."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def put(self, value: graph_lib.Value, x):
    """`x` as this place holds `value`."""
    return span.put(x, self.layout(value))

  def layout_at_rest(self, value: graph_lib.Value):
    """How it holds a value that no stage is about to read.

    In host memory, if the devices may be another's.
    """
    layout = self.layout(value)
    return layout.with_memory_kind(offload.HOST) if self.lease else layout

  def store(self, value: graph_lib.Value, x):
    """`x` as this place holds `value` until a stage reads it."""
    made = span.put(x, self.layout_at_rest(value))
    return jax.block_until_ready(made) if self.lease else made

  def compile(
    self,
    flow: graph_lib.Flow,
    node: graph_lib.Node,
    donate: Container[int] = (),
    passed: Container[int] | None = None,
  ):
    """A function of the leaves that `node` reads, made ready to run.

    Args:
      flow: that it is of.
      node: which.
      donate: values that it may overwrite.
      passed: values that other instructions than calls have to do with; None
        for all.
    """
    stage = node.stage
    if stage.host:
      alone = self.mesh is None and self.lease is None and passed is not None
      stays = [alone and v not in passed for v in node.writes]
      return Outside(self, flow, node, stays)
    reads = [flow.values[v] for v in node.reads]
    writes = [flow.values[v] for v in node.writes]
    spare = self._reusable(flow, node, donate)
    key = (
      stage,
      node.takes,
      tuple((v.shape, v.dtype, v.letters) for v in reads + writes),
      spare,
    )
    # A thread that wants what another is compiling waits for it.
    with self.locks.setdefault(key, threading.Lock()):
      if key not in self.calls:
        self.calls[key] = self._compiled(node, reads, writes, spare)
    return self.calls[key]

  def _compiled(self, node, reads, writes, spare):
    stage = node.stage
    rows = None
    if not graph_lib.is_plumbing(node):
      rows = self.micro_batch.get(stage.name)
    # Already jitted: what the flow has traced is not traced again.
    fn = stage.run
    if rows:
      fn = micro_batch.in_micro_batches(stage, rows, self._spread)

    def call(*leaves):
      if node.takes is not None:
        leaves = jax.tree.unflatten(node.takes, leaves)
      return jax.tree.leaves(fn(*leaves))

    call.__name__ = stage.name  # What a profiler shows.
    run = jax.jit(
      call,
      in_shardings=[self.layout(v) for v in reads],
      out_shardings=[self.layout(v) for v in writes],
      donate_argnums=spare,
    )
    like = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in reads]
    with self.ambient():  # Models say how rows lie on it.
      lowered = run.lower(*like)
    made = [(x.shape, x.dtype) for x in jax.tree.leaves(lowered.out_info)]
    if made != [(v.shape, v.dtype) for v in writes]:
      raise ValueError(
        f'Stage {stage.name} makes something else of a piece of its rows than '
        f'of all of them ({writes[0].name} and what follows): its sums must '
        'have one shape. Cut the batch in fewer pieces.'
      )
    return lowered.compile()

  def _spread(self, x):
    """Shares the rows of `x[micro-batch, row, ...]` over the devices."""
    if self.mesh is None:
      return x
    letters = ('', 'B') + ('',) * (x.ndim - 2)
    spec = rules_lib.spec(self.mesh, letters, x.shape, self.rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

  def _reusable(self, flow, node, donate) -> tuple[int, ...]:
    """Positions of donated values whose memory some output can take over."""
    room = [(flow.values[v].shape, flow.values[v].dtype) for v in node.writes]
    spare = []
    for i, v in enumerate(node.reads):
      kind = flow.values[v].shape, flow.values[v].dtype
      if v in donate and math.prod(kind[0]) > 1 and kind in room:
        room.remove(kind)
        spare.append(i)
    return tuple(spare)


class Outside(NamedTuple):
  """A call of a host stage of leaves, whose results are laid out at a place.

  Compiled calls take in many NumPy arrays faster than they are laid out one by
  one: those that nothing else wants are left to them.

  Attributes:
    place: where.
    flow: that it is of.
    node: which.
    stays: by result: whether it may stay in NumPy.
  """

  place: Place
  flow: graph_lib.Flow
  node: graph_lib.Node
  stays: list[bool]

  def __call__(self, *leaves):
    return self.end(self.begin(*leaves), *leaves)

  def begin(self, *leaves):
    """Begins it."""
    return self.node.stage.start(*jax.tree.unflatten(self.node.takes, leaves))

  def end(self, begun, *leaves):
    """Waits for what was begun."""
    args = jax.tree.unflatten(self.node.takes, leaves)
    made = jax.tree.leaves(self.node.stage.finish(begun, *args))
    return [
      x
      if stays and isinstance(x, np.ndarray)
      else self.place.put(self.flow.values[v], x)
      for v, x, stays in zip(self.node.writes, made, self.stays, strict=True)
    ]
