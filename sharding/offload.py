"""Between device memory and the host's, without a change of layout."""

from collections.abc import Sequence

import jax

HOST, DEVICE = 'pinned_host', 'device'  # Kinds of memory, as JAX calls them.


def is_offloaded(x: jax.Array) -> bool:
  """Whether `x` is in host memory."""
  return x.sharding.memory_kind == HOST


def to_host(xs: Sequence[jax.Array]) -> list[jax.Array]:
  """Arrays in host memory that their devices can reach; layouts stay."""
  return _moved(xs, HOST)


def to_device(xs: Sequence[jax.Array]) -> list[jax.Array]:
  """Arrays in the memory of their devices; themselves if they are there."""
  return _moved(xs, DEVICE)


def _moved(xs, kind):
  there = [x.sharding.memory_kind == kind for x in xs]
  moving = [x for x, ready in zip(xs, there, strict=True) if not ready]
  where = [x.sharding.with_memory_kind(kind) for x in moving]
  moved = iter(jax.block_until_ready(jax.device_put(moving, where)))
  return [
    x if ready else next(moved) for x, ready in zip(xs, there, strict=True)
  ]
