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
  """The tree of dicts whose leaves by path are given.

  Raises:
    ValueError: if one path is the beginning of another.
  """
  tree = {}
  for path, x in leaves.items():
    *parents, name = path.split('/')
    at = tree
    for i, parent in enumerate(parents, 1):
      at = at.setdefault(parent, {})
      if (outer := '/'.join(parents[:i])) in leaves:
        raise ValueError(
          f'There are arrays {outer!r} and {path!r}, and an array cannot hold '
          'another: give them different names.'
        )
    at[name] = x
  return tree
