"""Leaves of a tree by their path."""

import jax


def flatten(tree) -> dict:
  """Leaves by path, such as 'image/front'; a lone array has the path ''."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in leaves
  }


def unflatten(leaves: dict) -> dict:
  """The tree of dicts whose leaves by path are given."""
  tree = {}
  for path, x in leaves.items():
    *parents, name = path.split('/')
    at = tree
    for parent in parents:
      at = at.setdefault(parent, {})
    at[name] = x
  return tree
