"""Arrays of a state that are read when they are used, one after the other.

An export reads every parameter once, so a model is written by a process whose
memory holds no more than one of its arrays.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

from rlinf_jax.state import state_readers


class FileArray(np.lib.mixins.NDArrayOperatorsMixin):
  """An array that is read from files on use.

  Of all arrays of a state, only the one that was used last is kept.
  Arithmetic with it gives arrays of NumPy.

  Attributes:
    shape: of the array.
    dtype: its type.
  """

  def __init__(self, shape, dtype, read: Callable[[], np.ndarray]):
    self.shape, self.dtype, self._read = tuple(shape), dtype, read

  @property
  def ndim(self) -> int:
    """Number of dimensions."""
    return len(self.shape)

  @property
  def size(self) -> int:
    """Number of elements."""
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def nbytes(self) -> int:
    """Bytes of the whole array."""
    return self.size * np.dtype(self.dtype).itemsize

  def __array__(self, dtype=None, copy=None):
    """The whole array, in memory."""
    x = self._read()
    return np.array(x, dtype) if copy else np.asarray(x, dtype)

  def __getitem__(self, index):
    """A part of it."""
    return self._read()[index]

  def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
    """A function of NumPy, of whole arrays."""
    arrays = [np.asarray(x) if x is self else x for x in inputs]
    return getattr(ufunc, method)(*arrays, **kwargs)


def of_state(state: state_readers.StateReader, shapes: Any) -> Any:
  """A tree of a state whose arrays are read when they are used.

  Args:
    state: reads the state.
    shapes: a tree of the shapes and types of its arrays. Scalars are read at
      once.
  """
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  last = {}  # The array that was read last, by its number.

  def read(i):
    if i not in last:
      last.clear()  # Before another one takes memory.
      (found,) = state.read(shapes, {i: {'': layout}})
      last[i] = np.asarray(found[2])
    return last[i]

  leaves = [
    FileArray(x.shape, x.dtype, functools.partial(read, i))
    for i, x in enumerate(jax.tree.leaves(shapes))
  ]
  scalars = {i: {'': layout} for i, x in enumerate(leaves) if not x.ndim}
  for i, _, x in state.read(shapes, scalars):
    leaves[i] = x
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
