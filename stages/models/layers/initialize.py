"""Random parameters of a tree of shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding import rules


def is_vector(path) -> bool:
  """Whether the path leads to a bias or a norm scale."""
  name = path[-1].key
  return 'bias' in name or len(rules.letters_of(name)) == 1


def draw(shapes: Any, key: jax.Array, stddev: float, scale: float = 1.0) -> Any:
  """Normal matrices, equal scales and biases of zero.

  One draw serves all matrices: compiling one for each takes seconds.

  Args:
    shapes: shapes and types of the parameters; the matrices have one type.
    key: what matrices follow from.
    stddev: their standard deviation.
    scale: the value of scales.
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
  ends = np.cumsum([leaf.size for _, leaf in leaves])
  noise = jax.random.normal(key, ends[-1:], leaves[0][1].dtype) * stddev
  params = []
  for (path, leaf), part in zip(
    leaves, jnp.split(noise, ends[:-1]), strict=True
  ):
    if is_vector(path):
      fill = 0.0 if 'bias' in path[-1].key else scale
      params.append(jnp.full(leaf.shape, fill, leaf.dtype))
    else:
      params.append(part.reshape(leaf.shape))
  return jax.tree.unflatten(tree, params)
