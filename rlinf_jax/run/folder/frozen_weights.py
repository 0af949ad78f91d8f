"""Frozen parameters in checkpoints: only a checksum of them.

Frozen is what a state has under the key `base.FROZEN`, such as weights beside
an adapter, a teacher, or reward models.

A run that resumes reads them again from where it first read them, and the
checksum shows whether they are still the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stages import base


def _has_frozen(x) -> bool:
  return isinstance(x, dict) and base.FROZEN in x


def remove(state: Any) -> Any:
  """A state without its frozen parameters."""

  def trained(x):
    if not _has_frozen(x):
      return x
    return {key: value for key, value in x.items() if key != base.FROZEN}

  return jax.tree.map(trained, state, is_leaf=_has_frozen)


def restore(trained: Any, state: Any) -> Any:
  """Adds the frozen parameters of `state` to the result of `remove`."""

  def whole(x, rest):
    return rest | {base.FROZEN: x[base.FROZEN]} if _has_frozen(x) else rest

  return jax.tree.map(whole, state, trained, is_leaf=_has_frozen)


def checksums(state: Any) -> dict[str, int]:
  """A checksum of the bits of each frozen parameter, uint32, by its path."""
  leaves = {
    jax.tree_util.keystr(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(state)
    if jax.tree_util.DictKey(base.FROZEN) in path
  }
  return {name: int(x) for name, x in _sums(leaves).items()} if leaves else {}


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
