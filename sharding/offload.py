"""Offloading of arrays to host memory and back, with the same layout."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

HOST, DEVICE = 'pinned_host', 'device'  # JAX's names of memory kinds.


def on_host(layout: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """Returns the same layout in host memory."""
  hosted = layout.with_memory_kind(HOST)
  if hosted.memory_kind != HOST:
    # Devices that are compiled for without being here may not list memories.
    return _OnHost(layout.mesh, layout.spec)
  return hosted


def on_device(layout: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """Returns the same layout in the memory of its devices."""
  if layout.memory_kind != HOST:
    return layout
  return layout.with_memory_kind(DEVICE)


def is_known(layout: jax.sharding.Sharding) -> bool:
  """Whether the devices of a layout list the memory that it is in."""
  return not isinstance(layout, _OnHost)


class _OnHost(NamedSharding):
  """A layout in host memory, on devices that do not list their memories.

  `NamedSharding` drops a kind of memory that its devices do not list, so the
  property is overridden. It is for arguments alone: of results, JAX compares
  the kind with that of the executable, which has none.
  """

  @property
  def memory_kind(self) -> str:
    return HOST


def is_offloaded(x: jax.Array) -> bool:
  """Whether `x` is in host memory."""
  return x.sharding.memory_kind == HOST


def to_host(xs: Sequence[jax.Array]) -> list[jax.Array]:
  """Copies arrays to pinned host memory, with their layouts."""
  return _move(xs, HOST)


def to_device(xs: Sequence[jax.Array]) -> list[jax.Array]:
  """Copies arrays to device memory; arrays already there are returned."""
  return _move(xs, DEVICE)


def _move(xs, kind):
  there = [x.sharding.memory_kind == kind for x in xs]
  away = [x for x, is_there in zip(xs, there, strict=True) if not is_there]
  layouts = [x.sharding.with_memory_kind(kind) for x in away]
  moved = iter(jax.block_until_ready(jax.device_put(away, layouts)))
  return [
    x if is_there else next(moved)
    for x, is_there in zip(xs, there, strict=True)
  ]
