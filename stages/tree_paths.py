"""Leaves of a tree by the names on their paths."""

import jax


def of(tree) -> dict:
  """Leaves by name, such as 'image/front'; '' is that of a lone array."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in leaves
  }
