"""Reads Hugging Face checkpoints in safetensors format, tensor by tensor.

Files are read lazily: each device reads its own part of each tensor, one
parameter at a time, so neither a whole checkpoint nor a whole tensor needs to
fit on one device.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import itertools
import json
import math
import pathlib
import re
from typing import Any
import weakref

import jax
import numpy as np

from sharding import deferred, rules
from stages.models.files import naming

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
FLOATS = ('F64', 'F32', 'F16', 'BF16')
MOST_SHOWN = 1400  # Characters of a message at each of its ends.
MOST_FAULTS = 50  # That one error names.
MOST_BYTES = 2**28  # Of a file in JSON: a larger one is none of a checkpoint.
MOST_LISTED = 10_000  # Missing tensors that are looked up by name.
# Weights in other formats.
OTHER_FORMATS = ('*.gguf', '*.bin', '*.pt', '*.pth', '*.ckpt', '*.h5', '*.npz')
HUB_NAME = re.compile(r'[\w.-]+/[\w.-]+')


class CheckpointError(ValueError):
  """An unreadable checkpoint, with everything that is wrong with it.

  A stranger's file may have put anything into the message, so that it is kept
  on one line and short.
  """

  def __init__(self, message: str):
    """Cuts out the middle of a message that is too long."""
    message = ' '.join(message.split())
    if len(message) > 2 * MOST_SHOWN:
      message = f'{message[:MOST_SHOWN]} … {message[-MOST_SHOWN:]}'
    super().__init__(message)


def checkpoint_tensors(
  params: Any, names: naming.Names
) -> Iterator[tuple[str, Any]]:
  """Yields the names and tensors of a checkpoint, as views where possible.

  Args:
    params: a tree of arrays with `reshape` and `T`: JAX, NumPy or torch.
    names: the checkpoint tensor of each parameter, by the last key of its path.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = naming.tensor_of(names, path)
    for index, name in naming.parts_of(tensor, leaf.shape):
      yield name, naming.write_part(leaf[index] if index else leaf, tensor)


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
    if not isinstance(name, str)
    or pathlib.PurePath(name).name != name
    or '\0' in name
    or len(name.encode(errors='replace')) > 255
  ]
  if outside:
    raise CheckpointError(
      f'{path} names {outside[:8]!r:.400}, which are not files of its own '
      'folder: do not trust this checkpoint.'
    )
  return sorted({*names})


def where_to_get(checkpoint: str | pathlib.Path) -> str:
  """The advice of a message about a checkpoint that is no folder of a model."""
  path = pathlib.Path(checkpoint)
  ggufs = [path] if path.suffix == '.gguf' else sorted(path.glob('*.gguf'))
  if ggufs and ggufs[0].is_file():
    return (
      'Convert the GGUF file by `python -m rlinf_jax.prepare.gguf_model '
      f'{ggufs[0]} FOLDER`, and give FOLDER.'
    )
  advice = 'Give the folder of a model in Hugging Face format'
  if HUB_NAME.fullmatch(str(checkpoint)) and not path.parent.exists():
    advice += (
      '; a model of this name on huggingface.co is downloaded by `hf download '
      f'{checkpoint} --local-dir FOLDER`'
    )
  return f'{advice}.'


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
    folder: of the checkpoint.
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
    self.folder, self.file_of = folder, {}
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


def _names(
  tensor: naming.Tensor, shape
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """Names and shapes of the checkpoint tensors that make up a parameter."""
  stored = naming.stored_shape(shape[len(naming.stacked(tensor)) :], tensor)
  for _, name in naming.parts_of(tensor, shape):
    yield name, stored


def _check_count(files: TensorFiles, folder, tensor: naming.Tensor, shape):
  """Refuses billions of layers and experts before they are listed by name."""
  count = math.prod(shape[: len(naming.stacked(tensor))])
  if count > len(files.file_of) + MOST_LISTED:
    raise CheckpointError(
      f'{folder} does not hold the model that its config.json describes: '
      f'{count} tensors {tensor.name} are needed, and it has '
      f'{len(files.file_of)} tensors in all.'
    )


def _check(
  files: TensorFiles, shapes: Any, names: naming.Names, ignored: frozenset
):
  """Raises one error for all missing, extra and wrongly shaped tensors."""
  folder, wanted = files.folder, {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    tensor = naming.tensor_of(names, path)
    _check_count(files, folder, tensor, leaf.shape)
    wanted |= dict(_names(tensor, leaf.shape))
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


def check(
  folder: str | pathlib.Path,
  shapes: Any,
  names: naming.Names,
  *,
  ignored: frozenset[str] = frozenset(),
):
  """Checks that a checkpoint has the tensors of a model; reads no values.

  Args:
    folder: as in `load`.
    shapes: likewise.
    names: likewise.
    ignored: likewise.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors.
  """
  with contextlib.ExitStack() as stack:
    _check(TensorFiles(pathlib.Path(folder), stack), shapes, names, ignored)


def load(
  folder: str | pathlib.Path,
  shapes: Any,
  names: naming.Names,
  *,
  ignored: frozenset[str] = frozenset(),
  seen_as: Callable[[TensorFiles], Any] = lambda files: files,
):
  """Loads the parameters of a checkpoint onto their devices.

  Under `jax.set_mesh`, each parameter is sharded by the letters in its name;
  otherwise it goes to the first device. Within `deferred.defer`, each is read
  when it is needed.

  Args:
    folder: folder of a checkpoint in one or several files.
    shapes: a tree of shapes and types.
    names: the checkpoint tensor of each parameter, by the last key of its path.
    ignored: names of tensors that may be present and are not read.
    seen_as: `files -> files`, which may have other values in their tensors.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors, or
      one with a value that is NaN or infinite.
  """
  stack = contextlib.ExitStack()
  files = TensorFiles(pathlib.Path(folder), stack)
  weakref.finalize(files, stack.close)  # Deferred parameters are read later.
  return load_open(seen_as(files), shapes, names, ignored)


def load_open(
  files: TensorFiles, shapes: Any, names: naming.Names, ignored: frozenset
):
  """As `load`, from files that are open or from what has their methods."""
  _check(files, shapes, names, ignored)

  def read(path, leaf, layout=None):
    tensor = naming.tensor_of(names, path)
    part = functools.partial(_read_parameter, files, tensor, leaf)
    return deferred.read(leaf.shape, leaf.dtype, part, layout)

  # The layout of a deferred parameter is known when it is needed.
  if deferred.is_deferring() or (mesh := jax.sharding.get_mesh()).empty:
    return jax.tree_util.tree_map_with_path(read, shapes)
  layouts = rules.shardings(shapes, mesh)
  return jax.tree_util.tree_map_with_path(read, shapes, layouts)


def check_finite(name: str, *arrays: np.ndarray):
  """Raises CheckpointError for a value that is NaN or infinite."""
  if not all(np.isfinite(x).all() for x in arrays):
    raise CheckpointError(
      f'{name} has values that are NaN or infinite: copy the checkpoint again, '
      'or take an earlier one.'
    )


def _read_parameter(files: TensorFiles, tensor: naming.Tensor, leaf, index):
  """Slice `index` of a parameter, stacked over layers where it is."""

  def read(name, index, shape):
    part = naming.read_part(files.slice(name), index, shape, tensor)
    part = np.asarray(part, leaf.dtype)
    check_finite(f'{name} of {files.folder}', part)
    return part

  keys = naming.stacked(tensor)
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
