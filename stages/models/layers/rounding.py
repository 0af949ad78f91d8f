"""Parameters as a model rounds them before it uses them."""

from typing import Any

import jax

from sharding import deferred
from stages.models.layers import initialize


def round_matrices(params: Any, dtype: Any, kept: tuple[str, ...] = ()) -> Any:
  """Parameters with matrices in the type of the arithmetic.

  Biases and norm scales are used in the type that they are stored in, so they
  stay in it. A matrix that is read from files later is read in the new type.

  Args:
    params: parameters by name, in a tree.
    dtype: the type of the arithmetic.
    kept: names of others that stay as they are.
  """

  def rounded(path, leaf):
    stays = initialize.is_vector(path) or path[-1].key in kept
    return leaf if stays else deferred.astype(leaf, dtype)

  return jax.tree_util.tree_map_with_path(rounded, params)
