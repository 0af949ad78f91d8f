"""Writes Hugging Face checkpoints in safetensors format."""

import collections
import contextlib
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stages.models.files import naming, weights


def save(
  folder: str | pathlib.Path,
  params: Any,
  names: naming.Names,
  *,
  dtype: str = 'float32',
  shard_bytes: int | None = 5 * 2**30,
):
  """Writes parameters as a checkpoint, in several files if it is large.

  Args:
    folder: where to write; created if it does not exist.
    params: a tree of arrays.
    names: the checkpoint tensor of each parameter, by the last key of its path.
    dtype: the type to write them in.
    shard_bytes: maximum bytes of tensors in one file; None for a single file.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  dtype = jnp.dtype(dtype)
  shards = _shards(params, names, dtype.itemsize, shard_bytes)
  file_of, total = {}, 0
  for n, shard in enumerate(shards):
    file = weights.SINGLE
    if len(shards) > 1:
      file = f'model-{n + 1:05d}-of-{len(shards):05d}.safetensors'
    tensors = {}
    for name, parts in shard.items():
      written = []
      for leaf, at, tensor in sorted(parts, key=lambda x: x[2].part or ()):
        part = np.asarray(jax.device_get(leaf[at] if at else leaf), dtype)
        written.append(naming.write_part(part, tensor))
      whole = np.concatenate(written) if len(written) > 1 else written[0]
      tensors[name] = np.ascontiguousarray(whole)
      total += whole.nbytes
    st.save_file(tensors, folder / file, metadata={'format': 'pt'})
    file_of |= dict.fromkeys(tensors, file)
  (folder / weights.INDEX).unlink(missing_ok=True)
  if len(shards) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': file_of}
    (folder / weights.INDEX).write_text(json.dumps(index, indent=2))


def _shards(
  params, names, itemsize: int, shard_bytes: int | None
) -> list[dict]:
  """By file: parameters, indices and relations of each checkpoint tensor."""
  tensors, size_of = {}, collections.Counter()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = naming.tensor_of(names, path)
    parts = list(naming.parts_of(tensor, leaf.shape))
    for at, name in parts:
      tensors.setdefault(name, []).append((leaf, at, tensor))
      size_of[name] += leaf.size // len(parts) * itemsize
  sizes, shards = [0], [{}]
  for name, parts in tensors.items():
    is_full = shard_bytes and sizes[-1] + size_of[name] > shard_bytes
    if shards[-1] and is_full:
      sizes.append(0)
      shards.append({})
    sizes[-1] += size_of[name]
    shards[-1][name] = parts
  return shards


@contextlib.contextmanager
def new_folder(folder: pathlib.Path):
  """A folder to make and write, which becomes `folder` when it is complete.

  `folder` may be the original checkpoint, and an interrupted export must leave
  it as it was.
  """
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  yield part
  shutil.rmtree(folder, ignore_errors=True)
  part.replace(folder)
