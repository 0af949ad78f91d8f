"""A robot policy as a file: its parameters and observation statistics."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from sharding import deferred
from stages import tree_paths

FILE = 'policy.safetensors'


def export(folder: str | pathlib.Path, params):
  """Writes a tree of arrays as one safetensors file, atomically.

  Args:
    folder: where the file goes; made if needed.
    params: what `Workflow.params` returns. An array is named by its path.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  part = folder / f'{FILE}.part'
  arrays = {
    name: np.asarray(x, order='C')
    for name, x in tree_paths.flatten(params).items()
  }
  st.save_file(arrays, part)
  part.replace(folder / FILE)


def read(folder: str | pathlib.Path, like):
  """Reads what `export` has written.

  Args:
    folder: of the file.
    like: a tree of arrays, or of their shapes, with the structure to return.

  Raises:
    FileNotFoundError: if there is no policy.
    ValueError: if names, shapes or dtypes differ from those of `like`.
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
  """The parameters that training starts from.

  Args:
    folder: an exported policy; None for `fresh`.
    fresh: new parameters, as `Workflow.params` returns them. They are returned
      while tracing, too, as the folder may not exist yet.
  """
  traced = any(deferred.only_shapes(x) for x in jax.tree.leaves(fresh))
  if folder is None or traced:
    return fresh
  return jax.tree.map(jnp.asarray, read(folder, fresh))
