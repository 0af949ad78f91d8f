"""Arrays that are read from files, or computed, when they are used.

An export uses every parameter once, so a model is written by a process whose
memory holds one of its arrays and the file that is being written.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np


class LazyArray(np.lib.mixins.NDArrayOperatorsMixin):
  """An array that is made on use, each time.

  Arithmetic with it gives arrays of NumPy.

  Attributes:
    shape: of the array.
    dtype: its type.
  """

  def __init__(self, shape, dtype, make: Callable[[], np.ndarray]):
    """Makes nothing yet.

    Args:
      shape: of the array.
      dtype: its type.
      make: returns it, such as one that `keep_last` returns.
    """
    self.shape, self.dtype, self._make = tuple(shape), dtype, make

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
    x = self._make()
    return np.array(x, dtype) if copy else np.asarray(x, dtype)

  def __getitem__(self, index):
    """A part of it."""
    return self._make()[index]

  def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
    """A function of NumPy, of whole arrays."""
    arrays = [np.asarray(x) if x is self else x for x in inputs]
    return getattr(ufunc, method)(*arrays, **kwargs)


def keep_last(
  make: Callable[[Hashable], np.ndarray],
) -> Callable[[Hashable], np.ndarray]:
  """Memoizes the last array alone, which is freed before another is made."""
  last: dict[Any, np.ndarray] = {}

  def made(name):
    if name not in last:
      last.clear()
      last[name] = make(name)
    return last[name]

  return made
