"""Frozen parameters in checkpoints: only a checksum of them.

Frozen is what a state has under the key `base.FROZEN`, such as weights beside
an adapter, a teacher, or reward models.

A run that resumes reads them again from where it first read them, and the
checksum shows whether they are still the same bits.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sharding import multihost


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
  """A checksum of the bits of each array, uint32, by its name.

  If several processes hold the arrays, all of them make this call.
  """
  sums = _sums(dict(arrays)) if arrays else {}
  return {name: int(multihost.gather(x)) for name, x in sums.items()}


@jax.jit
def _sums(leaves):
  def total(x):
    size = min(x.dtype.itemsize, 4)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * size}'))
    return _mixed(bits.astype(jnp.uint32)).sum(dtype=jnp.uint32)

  return {name: total(x) for name, x in leaves.items()}


def _mixed(bits):
  """A hash of each element and its position, so that swapped rows are seen.

  The mixing is the finalizer of MurmurHash3. A product with the position alone
  would not see rows that are a multiple of a power of two apart.
  """
  stride = 1
  for axis in reversed(range(bits.ndim)):
    position = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    bits += position * np.uint32(stride * 0x9E3779B1 % 2**32)
    stride *= bits.shape[axis]
  bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
  bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
  return bits ^ (bits >> 16)
