"""Hugging Face checkpoints in safetensors format, tensor by tensor.

Files are read lazily: each device reads its own part of each tensor, one
parameter at a time, so neither a whole checkpoint nor a whole tensor needs to
fit on one device.
"""

from collections.abc import Iterator
import contextlib
import itertools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding import rules

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
FLOATS = ('F64', 'F32', 'F16', 'BF16')
MOST_FAULTS = 50  # That one error names.
MOST_BYTES = 2**28  # Of a file in JSON: a larger one is none of a checkpoint.
MOST_LISTED = 10_000  # Missing tensors that are looked up by name.
# Weights in other formats.
OTHER_FORMATS = ('*.gguf', '*.bin', '*.pt', '*.pth', '*.ckpt', '*.h5', '*.npz')


class CheckpointError(ValueError):
  """An unreadable checkpoint, with everything that is wrong with it."""


class Tensor(NamedTuple):
  """The relation between a tensor of a checkpoint and one of our parameters.

  Attributes:
    name: name in the checkpoint; for a stacked parameter, with `{i}` in place
      of the layer, and `{e}` in place of the expert where that is stacked too.
    inputs: number of leading dimensions of our parameter that are inputs of a
      linear map. A checkpoint stores such a map as [outputs, inputs], each side
      flattened. 0 for a vector, which a checkpoint stores flat; None for an
      array that it stores as it is.
  """

  name: str
  inputs: int | None = None


def _stored_shape(shape: tuple[int, ...], inputs: int | None):
  """The shape in a checkpoint of a parameter without its layer dimension."""
  if inputs is None:
    return tuple(shape)
  outs = math.prod(shape[inputs:])
  return (outs, math.prod(shape[:inputs])) if inputs else (outs,)


def _flat_slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  """A slice of the flattened dimensions `shape` that contains `index`.

  It is exact if only the first dimension is sliced, and otherwise larger.
  """
  if not shape:  # A map to one number.
    return slice(0, 1)
  start, stop, _ = index[0].indices(shape[0])
  below = math.prod(shape[1:])
  return slice(start * below, stop * below)


def _unflatten(part, index, shape):
  """Restores dimensions that `_flat_slice` flattened, without the excess."""
  if not shape:
    return part[0]
  part = part.reshape(-1, *shape[1:], *part.shape[1:])
  return part[(slice(None), *index[1:])]


def _read_part(stored, index, shape, inputs) -> np.ndarray:
  """Slice `index` of a parameter, from its tensor in a checkpoint."""
  if inputs is None:
    return stored[index]
  rows = _flat_slice(index[inputs:], shape[inputs:])
  if not inputs:
    return _unflatten(stored[rows], index, shape)
  columns = _flat_slice(index[:inputs], shape[:inputs])
  part = _unflatten(stored[rows, columns], index[inputs:], shape[inputs:])
  part = np.moveaxis(part, -1, 0)
  return _unflatten(part, index[:inputs], shape[:inputs])


def _write_part(part, inputs: int | None):
  """A parameter in the shape in which a checkpoint stores it."""
  if inputs is not None:
    ins = math.prod(part.shape[:inputs])
    part = part.reshape(ins, -1).T if inputs else part.reshape(-1)
  return part


def checkpoint_tensors(
  params: Any, names: dict[str, Tensor]
) -> Iterator[tuple[str, Any]]:
  """Yields the names and tensors of a checkpoint, as views where possible.

  Args:
    params: a tree of arrays with `reshape` and `T`: JAX, NumPy or torch.
    names: the checkpoint tensor of each parameter, by the last key of its path.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = names[path[-1].key]
    for index, name in _parts(tensor, leaf.shape):
      yield name, _write_part(leaf[index] if index else leaf, tensor.inputs)


def _stacked(tensor: Tensor) -> list[str]:
  """Placeholders of the leading dimensions that a checkpoint stores apart."""
  return [key for key in ('i', 'e') if f'{{{key}}}' in tensor.name]


def _parts(tensor: Tensor, shape) -> Iterator[tuple[tuple[int, ...], str]]:
  """Indices into a parameter and the checkpoint tensors that they name."""
  keys = _stacked(tensor)
  for index in np.ndindex(*shape[: len(keys)]):
    yield index, tensor.name.format(**dict(zip(keys, index, strict=True)))


def read_json(path: pathlib.Path) -> Any:
  """The content of a file in JSON that came from strangers.

  Raises:
    CheckpointError: if it is no regular file, very large or not JSON.
  """
  if not path.is_file():  # A pipe would be waited for.
    raise CheckpointError(f'{path} is not a file: copy it again.')
  if (size := path.stat().st_size) > MOST_BYTES:
    raise CheckpointError(
      f'{path} has {size} bytes, and at most {MOST_BYTES} are read: do not '
      'trust this checkpoint.'
    )
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise CheckpointError(
      f'{path} is not JSON ({error}): copy it again.'
    ) from error


def _indexed(path: pathlib.Path) -> list[str]:
  """Names of the files that the index of a checkpoint lists."""
  index = read_json(path)
  files = index.get('weight_map') if isinstance(index, dict) else None
  names = [*files.values()] if isinstance(files, dict) else []
  if not names:
    raise CheckpointError(
      f'{path} is not the index of a checkpoint, as it has no weight_map: copy '
      'it again.'
    )
  outside = [
    name
    for name in names
    if not isinstance(name, str) or pathlib.PurePath(name).name != name
  ]
  if outside:
    raise CheckpointError(
      f'{path} names {outside[:8]!r:.400}, which are not files of its own '
      'folder: do not trust this checkpoint.'
    )
  return sorted({*names})


def _no_tensors(folder: pathlib.Path) -> str:
  """The message for a folder without tensors that can be read."""
  others = [x.name for kind in OTHER_FORMATS for x in folder.glob(kind)]
  advice = 'give the folder of a Hugging Face checkpoint in safetensors format.'
  if others:
    advice = (
      f'it holds {others[0]}, which is of another format. Convert it: load it '
      'with transformers and call save_pretrained.'
    )
  return f'{folder} holds neither {SINGLE} nor {INDEX}: {advice}'


class TensorFiles:
  """The open files of a checkpoint, and the file that holds each tensor.

  Attributes:
    file_of: the open file by tensor name.
  """

  def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack):
    import safetensors

    if (folder / INDEX).is_file():
      names = _indexed(folder / INDEX)
    elif (folder / SINGLE).is_file():
      names = [SINGLE]
    else:
      raise CheckpointError(_no_tensors(folder))
    # A pipe would be waited for, and a folder cannot be read.
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
      raise CheckpointError(
        f'{folder} lacks {absent[:8]}, which its {INDEX} names: copy the '
        'checkpoint again.'
      )
    self.file_of = {}
    for name in names:
      try:
        opened = stack.enter_context(
          safetensors.safe_open(folder / name, framework='numpy')
        )
      except safetensors.SafetensorError as error:
        raise CheckpointError(
          f'{folder / name} cannot be read ({error}): copy it again.'
        ) from error
      self.file_of |= dict.fromkeys(opened.keys(), opened)

  def slice(self, name: str):
    return self.file_of[name].get_slice(name)


def _names(tensor: Tensor, shape) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Names and shapes of the checkpoint tensors that make up a parameter."""
  stored = _stored_shape(shape[len(_stacked(tensor)) :], tensor.inputs)
  for _, name in _parts(tensor, shape):
    yield name, stored


def _check_count(files: TensorFiles, folder, tensor: Tensor, shape):
  """Refuses billions of layers and experts before they are listed by name."""
  count = math.prod(shape[: len(_stacked(tensor))])
  if count > len(files.file_of) + MOST_LISTED:
    raise CheckpointError(
      f'{folder} does not hold the model that its config.json describes: '
      f'{count} tensors {tensor.name} are needed, and it has '
      f'{len(files.file_of)} tensors in all.'
    )


def _check(files: TensorFiles, folder, wanted: dict, ignored: frozenset):
  """Raises one error for all missing, extra and wrongly shaped tensors."""
  faults = [
    f'missing {n}' for n in sorted(wanted.keys() - files.file_of.keys())
  ]
  extra = files.file_of.keys() - wanted.keys() - ignored
  faults += [f'extra {n}' for n in sorted(extra)]
  for name in sorted(wanted.keys() & files.file_of.keys()):
    got = tuple(files.slice(name).get_shape())
    if got != wanted[name]:
      faults.append(f'{name} is {list(got)}, expected {list(wanted[name])}')
    if (kind := files.slice(name).get_dtype()) not in FLOATS:
      faults.append(f'{name} is of type {kind}, expected one of {[*FLOATS]}')
  if len(faults) > MOST_FAULTS:
    more = len(faults) - MOST_FAULTS
    faults = [*faults[:MOST_FAULTS], f'and {more} more']
  if faults:
    raise CheckpointError(
      f'{folder} does not hold the model that its config.json describes: '
      f'{"; ".join(faults)}.'
    )


def load(
  folder: str | pathlib.Path,
  shapes: Any,
  names: dict[str, Tensor],
  *,
  ignored: frozenset[str] = frozenset(),
):
  """Loads the parameters of a checkpoint onto their devices.

  Under `jax.set_mesh`, each parameter is sharded by the letters in its name;
  otherwise it goes to the first device.

  Args:
    folder: folder of a checkpoint in one or several files.
    shapes: a tree of shapes and types.
    names: the checkpoint tensor of each parameter, by the last key of its path.
    ignored: names of tensors that may be present and are not read.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors, or
      one with a value that is NaN or infinite.
  """
  folder = pathlib.Path(folder)
  mesh = jax.sharding.get_mesh()
  with contextlib.ExitStack() as stack:
    files = TensorFiles(folder, stack)
    wanted = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
      tensor = names[path[-1].key]
      _check_count(files, folder, tensor, leaf.shape)
      wanted |= dict(_names(tensor, leaf.shape))
    _check(files, folder, wanted, ignored)

    def read(path, leaf, layout=None):
      tensor = names[path[-1].key]
      if layout is None:
        index = (slice(None),) * len(leaf.shape)
        return jax.device_put(_read_parameter(files, tensor, leaf, index))
      return jax.make_array_from_callback(
        leaf.shape,
        layout,
        lambda index: _read_parameter(files, tensor, leaf, index),
      )

    if mesh.empty:
      return jax.tree_util.tree_map_with_path(read, shapes)
    layouts = rules.shardings(shapes, mesh)
    return jax.tree_util.tree_map_with_path(read, shapes, layouts)


def _read_parameter(files: TensorFiles, tensor: Tensor, leaf, index):
  """Slice `index` of a parameter, stacked over layers where it is."""

  def read(name, index, shape):
    part = _read_part(files.slice(name), index, shape, tensor.inputs)
    part = np.asarray(part, leaf.dtype)
    if not np.isfinite(part).all():
      raise CheckpointError(
        f'{name} has values that are NaN or infinite: copy the checkpoint '
        'again, or take an earlier one.'
      )
    return part

  keys = _stacked(tensor)
  if not keys:
    return read(tensor.name, index, leaf.shape)
  n = len(keys)
  ranges = [range(leaf.shape[d])[index[d]] for d in range(n)]
  parts = [
    read(
      tensor.name.format(**dict(zip(keys, at, strict=True))),
      index[n:],
      leaf.shape[n:],
    )
    for at in itertools.product(*ranges)
  ]
  return np.stack(parts).reshape(*map(len, ranges), *parts[0].shape)


def save(
  folder: str | pathlib.Path,
  params: Any,
  names: dict[str, Tensor],
  *,
  dtype: str = 'float32',
  shard_bytes: int = 5 * 2**30,
):
  """Writes parameters as a checkpoint, in several files if it is large.

  Args:
    folder: where to write; created if it does not exist.
    params: a tree of arrays.
    names: the checkpoint tensor of each parameter, by the last key of its path.
    dtype: the type to write them in.
    shard_bytes: maximum bytes of tensors in one file.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  dtype = jnp.dtype(dtype)
  shards = _shards(params, names, dtype.itemsize, shard_bytes)
  file_of, total = {}, 0
  for n, shard in enumerate(shards):
    file = SINGLE
    if len(shards) > 1:
      file = f'model-{n + 1:05d}-of-{len(shards):05d}.safetensors'
    tensors = {}
    for name, (leaf, at, tensor) in shard.items():
      part = leaf[at] if at else leaf
      part = np.asarray(jax.device_get(part), dtype)
      tensors[name] = np.ascontiguousarray(_write_part(part, tensor.inputs))
      total += part.nbytes
    st.save_file(tensors, folder / file, metadata={'format': 'pt'})
    file_of |= dict.fromkeys(tensors, file)
  (folder / INDEX).unlink(missing_ok=True)
  if len(shards) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _shards(params, names, itemsize: int, shard_bytes: int) -> list[dict]:
  """By file: parameter, index and `Tensor` of each checkpoint tensor."""
  sizes, shards = [0], [{}]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = names[path[-1].key]
    parts = list(_parts(tensor, leaf.shape))
    size = leaf.size // len(parts) * itemsize
    for at, name in parts:
      if shards[-1] and sizes[-1] + size > shard_bytes:
        sizes.append(0)
        shards.append({})
      sizes[-1] += size
      shards[-1][name] = (leaf, at, tensor)
  return shards
