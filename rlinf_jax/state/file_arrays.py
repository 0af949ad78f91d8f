"""Arrays of a state that are read when they are used, one after the other."""

import functools
from typing import Any

import jax
import numpy as np

from rlinf_jax.state import state_readers
from stages.models.files import lazy_array


def of_state(state: state_readers.StateReader, shapes: Any) -> Any:
  """A tree of a state whose arrays are read when they are used.

  Args:
    state: reads the state.
    shapes: a tree of the shapes and types of its arrays. Scalars are read at
      once.
  """
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  @lazy_array.keep_last
  def read(i):
    ((_, _, x),) = state.read(shapes, {i: {'': layout}})
    return np.asarray(x)

  leaves = [
    lazy_array.LazyArray(x.shape, x.dtype, functools.partial(read, i))
    for i, x in enumerate(jax.tree.leaves(shapes))
  ]
  scalars = {i: {'': layout} for i, x in enumerate(leaves) if not x.ndim}
  for i, _, x in state.read(shapes, scalars):
    leaves[i] = x
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
