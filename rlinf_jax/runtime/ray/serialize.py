"""Arrays as other processes can read them: plain NumPy, whatever their type.

Ray carries NumPy arrays of its own types without a copy, by shared memory where
both ends are on one machine. What NumPy does not have (bfloat16 and its like,
keys) goes as the bytes that it is made of.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Serialized(NamedTuple):
  """An array on its way.

  Attributes:
    data: of a type that NumPy has.
    dtype: the type that it is read as; of a key, '' and `key` says which.
    key: the kind of random keys, if it is of keys.
  """

  data: np.ndarray
  dtype: str
  key: str = ''


def pack(x: Any) -> Serialized:
  """Takes an array from its devices."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = np.asarray(jax.random.key_data(x))
    return Serialized(data, '', str(jax.random.key_impl(x)))
  data = np.asarray(x)
  if data.dtype.kind == 'V':  # A type of ml_dtypes: NumPy sees bytes.
    plain = data.view(f'u{data.dtype.itemsize}')
    return Serialized(plain, data.dtype.name)
  return Serialized(data, data.dtype.name)


def unpack(parcel: Serialized) -> Any:
  """The array; its memory may be shared, and must not be written."""
  data, dtype, key = parcel
  if key:
    return jax.random.wrap_key_data(data, impl=key)
  return data if data.dtype.name == dtype else data.view(jnp.dtype(dtype))
