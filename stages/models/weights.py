"""Checkpoints of Hugging Face, tensor by tensor, in and out.

Files are read lazily: each device reads the part of each tensor that it will
hold, one parameter at a time, so neither a whole checkpoint nor a whole tensor
need fit on one device.
"""

from collections.abc import Iterator
import contextlib
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


class CheckpointError(ValueError):
  """A checkpoint that cannot be read; says all that is wrong with it."""


class Tensor(NamedTuple):
  """How one tensor of a checkpoint relates to a parameter.

  Attributes:
    name: in the checkpoint; of a stacked parameter, with `{i}` for the layer.
    inputs: leading dimensions of ours that are inputs of a linear map, which a
      checkpoint stores as [outputs, inputs], each side flattened; 0 for a
      vector, which it stores flat; None where it stores the array as it is.
  """

  name: str
  inputs: int | None = None


def _stored_shape(shape: tuple[int, ...], inputs: int | None):
  """The shape in a checkpoint of a parameter without its layer dimension."""
  if inputs is None:
    return tuple(shape)
  outs = math.prod(shape[inputs:])
  return (outs, math.prod(shape[:inputs])) if inputs else (outs,)


def _run(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  """The run of flattened places that holds `index` of dimensions `shape`.

  Exact where only the first dimension is cut; otherwise it holds more.
  """
  start, stop, _ = index[0].indices(shape[0])
  below = math.prod(shape[1:])
  return slice(start * below, stop * below)


def _unflat(part, index, shape):
  """The dimensions that `_run` flattened, and what it took too much."""
  part = part.reshape(-1, *shape[1:], *part.shape[1:])
  return part[(slice(None), *index[1:])]


def _read_part(stored, index, shape, inputs) -> np.ndarray:
  """The part `index` of one parameter, from its tensor in a checkpoint."""
  if inputs is None:
    return stored[index]
  rows = _run(index[inputs:], shape[inputs:])
  if not inputs:
    return _unflat(stored[rows], index, shape)
  columns = _run(index[:inputs], shape[:inputs])
  part = _unflat(stored[rows, columns], index[inputs:], shape[inputs:])
  part = np.moveaxis(part, -1, 0)
  return _unflat(part, index[:inputs], shape[:inputs])


def _write_part(part, inputs: int | None):
  """One parameter as a checkpoint stores it."""
  if inputs is not None:
    ins = math.prod(part.shape[:inputs])
    part = part.reshape(ins, -1).T if inputs else part.reshape(-1)
  return part


def checkpoint_tensors(
  params: Any, names: dict[str, Tensor]
) -> Iterator[tuple[str, Any]]:
  """Parameters as a checkpoint has them: names, and views where they can be.

  Args:
    params: a tree of arrays, of whatever library that reshapes and transposes.
    names: the tensor behind each parameter, by the last key of its path.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = names[path[-1].key]
    if '{i}' not in tensor.name:
      yield tensor.name, _write_part(leaf, tensor.inputs)
      continue
    for i in range(leaf.shape[0]):
      yield tensor.name.format(i=i), _write_part(leaf[i], tensor.inputs)


def _indexed(path: pathlib.Path) -> list[str]:
  """Names of the files that the index of a checkpoint lists."""
  try:
    return sorted(set(json.loads(path.read_text())['weight_map'].values()))
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise CheckpointError(
      f'{path} is not the index of a checkpoint ({error!r}): copy it again.'
    ) from error


class TensorFiles:
  """The open files of a checkpoint; knows which holds which tensor."""

  def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack):
    import safetensors

    if (folder / INDEX).exists():
      names = _indexed(folder / INDEX)
    elif (folder / SINGLE).exists():
      names = [SINGLE]
    else:
      raise CheckpointError(
        f'{folder} holds neither {SINGLE} nor {INDEX}: give the folder of a '
        'Hugging Face checkpoint in safetensors format.'
      )
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
      raise CheckpointError(
        f'{folder} lacks {absent}, which its {INDEX} names: copy the '
        'checkpoint again.'
      )
    self.where = {}
    for name in names:
      try:
        opened = stack.enter_context(
          safetensors.safe_open(folder / name, framework='numpy')
        )
      except safetensors.SafetensorError as error:
        raise CheckpointError(
          f'{folder / name} cannot be read ({error}): copy it again.'
        ) from error
      self.where |= dict.fromkeys(opened.keys(), opened)

  def slice(self, name: str):
    return self.where[name].get_slice(name)


def _names(tensor: Tensor, shape) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Names and shapes in a checkpoint of the tensors that make a parameter."""
  if '{i}' not in tensor.name:
    yield tensor.name, _stored_shape(shape, tensor.inputs)
    return
  for i in range(shape[0]):
    yield (
      tensor.name.format(i=i),
      _stored_shape(tuple(shape[1:]), tensor.inputs),
    )


def _check(files: TensorFiles, folder, wanted: dict, ignored: frozenset):
  """One error that names every missing, extra and mis-shaped tensor."""
  faults = [f'missing {n}' for n in sorted(wanted.keys() - files.where.keys())]
  extra = files.where.keys() - wanted.keys() - ignored
  faults += [f'extra {n}' for n in sorted(extra)]
  for name in sorted(wanted.keys() & files.where.keys()):
    got = tuple(files.slice(name).get_shape())
    if got != wanted[name]:
      faults.append(f'{name} is {list(got)}, expected {list(wanted[name])}')
  if faults:
    raise CheckpointError(
      f'{folder} does not hold the model that its config.json describes: '
      f'{"; ".join(faults)}.'
    )


def load(
  folder: str | pathlib.Path,
  like: Any,
  names: dict[str, Tensor],
  *,
  ignored: frozenset[str] = frozenset(),
):
  """Parameters from a checkpoint, straight to where they will lie.

  Under `jax.set_mesh`, each parameter is laid out by the letters in its name;
  otherwise it goes to the first device.

  Args:
    folder: of a checkpoint, in one file or in many.
    like: a tree of shapes and types.
    names: the tensor behind each parameter, by the last key of its path.
    ignored: names of tensors that may be there and are not read.

  Raises:
    CheckpointError: naming all tensors that are missing, extra or mis-shaped.
  """
  folder = pathlib.Path(folder)
  mesh = jax.sharding.get_mesh()
  with contextlib.ExitStack() as stack:
    files = TensorFiles(folder, stack)
    wanted = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
      wanted |= dict(_names(names[path[-1].key], leaf.shape))
    _check(files, folder, wanted, ignored)

    def load(path, leaf):
      tensor = names[path[-1].key]

      def part(index):
        if '{i}' not in tensor.name:
          made = _read_part(
            files.slice(tensor.name), index, leaf.shape, tensor.inputs
          )
          return np.asarray(made, leaf.dtype)
        layers = range(leaf.shape[0])[index[0]]
        return np.stack(
          [
            np.asarray(
              _read_part(
                files.slice(tensor.name.format(i=i)),
                index[1:],
                leaf.shape[1:],
                tensor.inputs,
              ),
              leaf.dtype,
            )
            for i in layers
          ]
        )

      if mesh.empty:
        return jax.device_put(part((slice(None),) * len(leaf.shape)))
      spec = rules.partition_spec(
        mesh, rules.dimensions(path, leaf.shape), leaf.shape
      )
      layout = jax.sharding.NamedSharding(mesh, spec)
      return jax.make_array_from_callback(leaf.shape, layout, part)

    return jax.tree_util.tree_map_with_path(load, like)


def save(
  folder: str | pathlib.Path,
  params: Any,
  names: dict[str, Tensor],
  *,
  dtype: str = 'float32',
  shard_bytes: int = 5 * 2**30,
):
  """Writes parameters as a checkpoint, several files if one would be too large.

  Args:
    folder: where; made if it is not there.
    params: a tree of arrays.
    names: the tensor behind each parameter, by the last key of its path.
    dtype: to write them in.
    shard_bytes: most bytes of tensors in one file.
  """
  from safetensors import numpy as st

  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  dtype = jnp.dtype(dtype)
  sizes, plan = [0], [{}]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = names[path[-1].key]
    count = leaf.shape[0] if '{i}' in tensor.name else 1
    size = leaf.size // count * dtype.itemsize
    for i in range(count):
      if plan[-1] and sizes[-1] + size > shard_bytes:
        sizes.append(0)
        plan.append({})
      sizes[-1] += size
      plan[-1][tensor.name.format(i=i)] = (leaf, i, tensor)
  where = {}
  for n, tensors in enumerate(plan):
    file = SINGLE
    if len(plan) > 1:
      file = f'model-{n + 1:05d}-of-{len(plan):05d}.safetensors'
    made = {}
    for name, (leaf, i, tensor) in tensors.items():
      part = leaf[i] if '{i}' in tensor.name else leaf
      part = np.asarray(jax.device_get(part), dtype)
      made[name] = np.ascontiguousarray(_write_part(part, tensor.inputs))
    st.save_file(made, folder / file, metadata={'format': 'pt'})
    where |= dict.fromkeys(made, file)
  (folder / INDEX).unlink(missing_ok=True)
  if len(plan) > 1:
    index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': where}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
