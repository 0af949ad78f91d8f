"""Random parameters of a tree of shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding import rules

DRAWN = 2**30  # Numbers of one draw: 4 GiB in float32.


def is_vector(path) -> bool:
  """Whether the path leads to a bias or a norm scale."""
  name = path[-1].key
  return 'bias' in name or len(rules.letters_of(name)) == 1


def draw(shapes: Any, key: jax.Array, stddev: float, scale: float = 1.0) -> Any:
  """Normal matrices, equal scales and biases of zero.

  Matrices are drawn together, up to `DRAWN` numbers: compiling a draw for each
  takes seconds, and one draw for all of a large model takes its memory again.

  Args:
    shapes: shapes and types of the parameters; the matrices have one type.
    key: what matrices follow from.
    stddev: their standard deviation.
    scale: the value of scales.
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
  params = []
  for i, together in enumerate(_together([leaf.size for _, leaf in leaves])):
    own = key if i == 0 else jax.random.fold_in(key, i)
    params += _drawn(leaves[together], own, stddev, scale)
  return jax.tree.unflatten(tree, params)


def _together(sizes: list[int]) -> list[slice]:
  """Arrays that are drawn at once: up to `DRAWN` numbers, or one array."""
  starts, total = [0], 0
  for i, size in enumerate(sizes):
    if total and total + size > DRAWN:
      starts.append(i)
      total = 0
    total += size
  return [*map(slice, starts, [*starts[1:], len(sizes)])]


def _drawn(leaves: list, key: jax.Array, stddev: float, scale: float) -> list:
  """The parameters of some leaves with their paths, from one draw."""
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
  return params
