"""Global arrays, of which each process holds the shards on its own devices.

Every process runs the same calls in the same order (`jax.distributed`). `put`
shards a batch or parameters that every process has; `gather` assembles them.
"""

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np


def put(x, layout: jax.sharding.Sharding, may_alias: bool | None = None):
  """Puts `x` in a layout.

  Args:
    x: an array. If several processes share the layout, either each of them
      passes the whole array, or `x` is a global array on the same devices.
    layout: the layout to put it in.
    may_alias: as in `jax.device_put`; a global array never aliases memory of
      the caller.
  """
  if layout.is_fully_addressable:
    x = _in_its_memory(x, layout)
    return jax.device_put(x, layout, may_alias=may_alias)
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return _reshard(layout)(x)
  # `device_put` would first compare `x` between the processes, and hang if they
  # have several devices (JAX 0.10.2).
  part = np.array if isinstance(x, np.ndarray) else lambda part: part
  return jax.make_array_from_callback(
    x.shape, layout, lambda index: part(x[index])
  )


def _in_its_memory(x, layout: jax.sharding.Sharding):
  """`x` in the kind of memory of a layout on some of its devices.

  `device_put` raises an error if one call is to change the kind of memory and
  to keep copies on some devices alone (JAX 0.10.2).
  """
  if not isinstance(x, jax.Array):
    return x
  kind, there = layout.memory_kind, x.sharding.device_set
  changes = x.sharding.memory_kind != kind and there != layout.device_set
  if not changes or there.isdisjoint(layout.device_set):
    return x
  return jax.device_put(x, x.sharding.with_memory_kind(kind))


def gather(x: jax.Array) -> jax.Array:
  """The whole of `x` on one device of this process.

  Every process that holds a shard of it has to call this.
  """
  if x.is_fully_addressable:
    return x
  if not x.is_fully_replicated:
    x = _reshard(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
  return x.addressable_data(0)


@functools.lru_cache
def _reshard(layout):
  """A program of all processes that changes the layout of an array."""
  return jax.jit(_identity, out_shardings=layout)


def _identity(x):
  return x
