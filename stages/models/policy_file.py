"""A robot's policy as a file: its parameters, and the scale that it sees by."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from stages import tree_paths

FILE = 'policy.safetensors'


def export(folder: str | pathlib.Path, params):
  """Writes a tree of arrays as one file, each by the names on its path.

  Args:
    folder: where to.
    params: what `Workflow.params` gives.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  part = folder / f'{FILE}.part'  # It is there whole or not at all.
  arrays = {
    name: np.asarray(x, order='C')
    for name, x in tree_paths.flatten(params).items()
  }
  st.save_file(arrays, part)
  part.replace(folder / FILE)


def read(folder: str | pathlib.Path, like):
  """What `export` has written.

  Args:
    folder: where it is.
    like: a tree of arrays, or of their shapes, as it shall be.

  Raises:
    ValueError: if it is of another policy.
  """
  from safetensors import numpy as st

  path = pathlib.Path(folder) / FILE
  if not path.is_file():
    raise FileNotFoundError(
      f'There is no policy at {path}: give the folder `model` of a run.'
    )
  arrays = st.load_file(path)
  want = {
    name: (x.shape, x.dtype) for name, x in tree_paths.flatten(like).items()
  }
  got = {name: (x.shape, x.dtype) for name, x in arrays.items()}
  if want != got:
    name = min(n for n in want | got if want.get(n) != got.get(n))
    raise ValueError(
      f'{path} holds another policy: {name} is {got.get(name)} there and '
      f'should be {want.get(name)}. Give the settings it was trained with.'
    )
  leaves = [arrays[name] for name in tree_paths.flatten(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def start(folder: str | pathlib.Path | None, fresh):
  """What training begins with: what was exported, or what is fresh.

  Args:
    folder: where it is; None for `fresh`.
    fresh: parameters as `Workflow.params` gives them. While shapes alone are
      asked for it is returned in any case: the folder may still be made.
  """
  traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(fresh))
  if folder is None or traced:
    return fresh
  return jax.tree.map(jnp.asarray, read(folder, fresh))
