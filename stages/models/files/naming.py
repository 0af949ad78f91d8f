"""Relations between the tensors of a checkpoint and our parameters."""

from collections.abc import Iterator, Mapping
import math
from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
  """The relation between a tensor of a checkpoint and one of our parameters.

  Attributes:
    name: name in the checkpoint; for a stacked parameter, with `{i}` in place
      of the layer, and `{e}` in place of the expert where that is stacked too.
    inputs: number of leading dimensions of our parameter that are inputs of a
      linear map. A checkpoint stores such a map as [outputs, inputs], each side
      flattened. 0 for a vector, which a checkpoint stores flat; None for an
      array that it stores as it is.
    ones: number of leading dimensions of size one that the checkpoint has in
      addition, where it stores the array as it is.
    part: which part of how many equal ones the parameter is, along the first
      dimension of a tensor that holds the parts of several parameters.
  """

  name: str
  inputs: int | None = None
  ones: int = 0
  part: tuple[int, int] | None = None


# The tensor of each parameter, by the last key of its path. Under the first
# keys of a model of several parts, a mapping of its own for each part.
Names = Mapping[str, Any]


def tensor_of(names: Names, path) -> Tensor:
  """The tensor of a checkpoint that holds the parameter at a path."""
  for key in path[:-1]:
    nested = names.get(key.key)
    names = nested if isinstance(nested, Mapping) else names
  return names[path[-1].key]


class _Window(NamedTuple):
  """A part of a stored tensor, which is sliced as the parameter is."""

  stored: Any
  start: int
  ones: int

  def __getitem__(self, index):
    first, *rest = index if isinstance(index, tuple) else (index,)
    if self.start:
      first = slice(self.start + first.start, self.start + first.stop)
    part = self.stored[(slice(0, 1),) * self.ones + (first, *rest)]
    return part.reshape(part.shape[self.ones :])


def stored_shape(shape: tuple[int, ...], tensor: Tensor):
  """The shape in a checkpoint of a parameter without its layer dimension."""
  inputs = tensor.inputs
  if inputs is None:
    return (1,) * tensor.ones + tuple(shape)
  outs = math.prod(shape[inputs:]) * (tensor.part[1] if tensor.part else 1)
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


def read_part(stored, index, shape, tensor: Tensor) -> np.ndarray:
  """Slice `index` of a parameter, from its tensor in a checkpoint."""
  inputs = tensor.inputs
  if tensor.part or tensor.ones:
    n, of = tensor.part or (0, 1)
    stored = _Window(stored, stored.get_shape()[0] // of * n, tensor.ones)
  if inputs is None:
    return stored[index]
  rows = _flat_slice(index[inputs:], shape[inputs:])
  if not inputs:
    return _unflatten(stored[rows], index, shape)
  columns = _flat_slice(index[:inputs], shape[:inputs])
  part = _unflatten(stored[rows, columns], index[inputs:], shape[inputs:])
  part = np.moveaxis(part, -1, 0)
  return _unflatten(part, index[:inputs], shape[:inputs])


def write_part(part, tensor: Tensor):
  """A parameter in the shape in which a checkpoint stores it."""
  inputs = tensor.inputs
  if inputs is None:
    return part.reshape((1,) * tensor.ones + part.shape)
  ins = math.prod(part.shape[:inputs])
  return part.reshape(ins, -1).T if inputs else part.reshape(-1)


def stacked(tensor: Tensor) -> list[str]:
  """Placeholders of the leading dimensions that a checkpoint stores apart."""
  return [key for key in ('i', 'e') if f'{{{key}}}' in tensor.name]


def parts_of(tensor: Tensor, shape) -> Iterator[tuple[tuple[int, ...], str]]:
  """Indices into a parameter and the checkpoint tensors that they name."""
  keys = stacked(tensor)
  for index in np.ndindex(*shape[: len(keys)]):
    yield index, tensor.name.format(**dict(zip(keys, index, strict=True)))
