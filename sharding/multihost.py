"""Arrays that several processes hold: each has the parts on its own devices.

Every process runs the same calls in the same order (`jax.distributed`), and an
array that is whole at one end, a batch or parameters on their way, is taken
apart and put together here.
"""

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np


def put(x, layout: jax.sharding.Sharding, may_alias: bool | None = None):
  """`x` in a layout.

  Args:
    x: where processes share the layout, either what each of them has the whole
      of, or an array that lies on the same devices.
    layout: that it shall have.
    may_alias: as in `jax.device_put`; what processes share is never memory of
      the caller.
  """
  if layout.is_fully_addressable:
    return jax.device_put(x, layout, may_alias=may_alias)
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    return _again(layout)(x)
  # `device_put` would compare `x` between the processes first, and hang where
  # they have several devices (0.10.2).
  part = np.array if isinstance(x, np.ndarray) else lambda part: part
  return jax.make_array_from_callback(
    x.shape, layout, lambda index: part(x[index])
  )


def gather(x: jax.Array) -> jax.Array:
  """All of `x` on one device of this process.

  Every process that holds a part of it has to call this.
  """
  if x.is_fully_addressable:
    return x
  if not x.is_fully_replicated:
    x = _again(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
  return x.addressable_data(0)


@functools.lru_cache
def _again(layout):
  """A program of all processes that changes a layout and nothing else."""
  return jax.jit(_same, out_shardings=layout)


def _same(x):
  return x
