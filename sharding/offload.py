"""Offloading of arrays to host memory and back, with the same layout."""

from collections.abc import Sequence

import jax

HOST, DEVICE = 'pinned_host', 'device'  # JAX's names of memory kinds.


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
