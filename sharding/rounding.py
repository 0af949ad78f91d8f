"""Rounds arrays that a place is to hold in a narrower type."""

import functools

import jax
import numpy as np

from sharding import offload


def rounded(x, dtype):
  """`x` in another type, in the layout and the memory that it has.

  The bits are those to which a stage rounds it. If several processes hold `x`,
  all of them make this call.

  Args:
    x: an array.
    dtype: its new type; None to return `x` as it is.
  """
  if dtype is None or x.dtype == dtype:
    return x
  if isinstance(x, np.ndarray):
    return x.astype(dtype)
  if not offload.is_offloaded(x):
    return _cast(dtype, x.sharding)(x)
  # An array in the memory of the host need not fit on the device.
  shards = [
    jax.device_put(np.asarray(shard.data).astype(dtype), shard.data.sharding)
    for shard in x.addressable_shards
  ]
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@functools.lru_cache
def _cast(dtype, layout):
  """A program that changes the type of an array, and nothing else."""
  return jax.jit(lambda x: x.astype(dtype), out_shardings=layout)
