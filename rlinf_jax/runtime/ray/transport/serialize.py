"""Converts arrays of any type to NumPy arrays that other processes can read.

Ray transfers NumPy arrays of NumPy's own types without a copy, by shared memory
where both ends are on one machine. Other types (bfloat16 and its like, random
keys) are sent as views of their bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Serialized(NamedTuple):
  """An array as data that Ray transfers.

  Attributes:
    data: of a type that NumPy has.
    dtype: name of the type to view it as; '' for random keys.
    key: implementation of random keys, such as 'threefry2x32'; '' otherwise.
  """

  data: np.ndarray
  dtype: str
  key: str = ''


def pack(x: Any) -> Serialized:
  """Copies an array from its devices."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = np.asarray(jax.random.key_data(x))
    return Serialized(data, '', str(jax.random.key_impl(x)))
  data = np.asarray(x)
  if data.dtype.kind == 'V':  # A type of ml_dtypes, which NumPy calls void.
    view = data.view(f'u{data.dtype.itemsize}')
    return Serialized(view, data.dtype.name)
  return Serialized(data, data.dtype.name)


def unpack(serialized: Serialized) -> Any:
  """The array; its memory may be shared and must not be written."""
  data, dtype, key = serialized
  if key:
    return jax.random.wrap_key_data(data, impl=key)
  return data if data.dtype.name == dtype else data.view(jnp.dtype(dtype))
