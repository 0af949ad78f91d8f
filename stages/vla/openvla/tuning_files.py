"""Files of a fine-tuned OpenVLA beside those of a model: adapters and heads.

Adapters are in PEFT's layout. Published fine-tuning adapts every linear map.
Those of layers of the language model are trained further. Others, such as those
of vision towers, are added to their weights as these are read, and stay as they
are in an export. Heads are files of torch, see `openvla_oft_files`.
"""

from collections.abc import Mapping
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import numpy as np

from stages import base
from stages.models import adapters
from stages.models.files import torch_file, weights

STATISTICS = 'dataset_statistics.json'
FOLDER = 'lora_adapter'  # As OpenVLA-OFT names it, beside its heads.
PREFIX = 'language_model.'  # Of tensors, within those of the whole model.
PARALLEL = 'module.'  # Before all names, as torch trained on several devices.
DOWN, UP = '.lora_A.weight', '.lora_B.weight'
FILES = {'state_projector': 'proprio_projector', 'l1_head': 'action_head'}
HEAD_FILES = tuple(f'{stem}--*_checkpoint.pt' for stem in FILES.values())


def _pair(ours: str, letters: str, theirs: str) -> dict[str, str]:
  bias = f'{ours}_bias_{letters[-1]}'
  return {f'{ours}_{letters}': f'{theirs}.weight', bias: f'{theirs}.bias'}


_BLOCK = 'model.mlp_resnet_blocks'
NAMES = {
  'state_projector': _pair('in', 'OF', 'fc1') | _pair('out', 'FD', 'fc2'),
  'l1_head': _pair('in_norm', 'O', 'model.layer_norm1')
  | _pair('in', 'OD', 'model.fc1')
  | _pair('block0_norm', 'D', f'{_BLOCK}.0.ffn.0')
  | _pair('block0', 'DF', f'{_BLOCK}.0.ffn.1')
  | _pair('block1_norm', 'D', f'{_BLOCK}.1.ffn.0')
  | _pair('block1', 'DF', f'{_BLOCK}.1.ffn.1')
  | _pair('out_norm', 'D', 'model.layer_norm2')
  | _pair('out', 'DA', 'model.fc2'),
}


class Adapted(NamedTuple):
  """Tensors of a model's files with some adapters added, as they are read.

  It has the methods of `weights.TensorFiles`.

  Attributes:
    files: those of the model.
    adapters: A, and α/r · B, by the name of the weight.
  """

  files: weights.TensorFiles
  adapters: Mapping[str, tuple[np.ndarray, np.ndarray]]

  @property
  def folder(self):
    return self.files.folder

  @property
  def file_of(self):
    return self.files.file_of

  def slice(self, name: str):
    found = self.files.slice(name)
    return _Sum(found, *self.adapters[name]) if name in self.adapters else found


class _Sum(NamedTuple):
  """A stored weight with its adapter added, W + (α/r) B A, in float32."""

  stored: Any
  down: np.ndarray
  up: np.ndarray

  def __getitem__(self, index):
    indices = index if isinstance(index, tuple) else (index,)
    rows, columns = (*indices, slice(None), slice(None))[:2]
    product = self.up[rows] @ self.down[:, columns]
    return np.asarray(self.stored[index], np.float32) + product

  def get_shape(self):
    return self.stored.get_shape()

  def get_dtype(self):
    return self.stored.get_dtype()


def tuned(
  checkpoint: str | pathlib.Path, adapter: str | None
) -> tuple[pathlib.Path, ...]:
  """Folders that may have heads and statistics; the first with one counts."""
  model = pathlib.Path(checkpoint)
  if adapter is not None:
    adapters.check_folder(adapter)
  if adapter is None or pathlib.Path(adapter).name != FOLDER:
    return (model,)
  return pathlib.Path(adapter).parent, model


def add(files: weights.TensorFiles, adapter: str | None, unread: frozenset):
  """The model's files, with adapters added that are not trained further.

  Args:
    files: of the model.
    adapter: folder of the adapter; None without one.
    unread: names of tensors that are not read; their adapters are ignored.

  Raises:
    CheckpointError: if the adapter is of another model.
  """
  if adapter is None:
    return files
  scale, stored = adapters.read_others(adapter, PREFIX)
  pairs, faults = {}, []
  for name in sorted({k.removesuffix(DOWN).removesuffix(UP) for k in stored}):
    weight = f'{name.removeprefix(adapters.PREFIX)}.weight'
    down, up = stored.get(f'{name}{DOWN}'), stored.get(f'{name}{UP}')
    if weight in unread:
      continue
    if weight not in files.file_of:
      faults.append(f'the model has no {weight}')
    elif down is None or up is None or down.ndim != 2 or up.ndim != 2:
      faults.append(f'{weight} has no pair of matrices')
    elif [*files.slice(weight).get_shape()] != [len(up), down.shape[1]] or (
      up.shape[1] != len(down)
    ):
      faults.append(
        f'{weight} is {[*files.slice(weight).get_shape()]}, and its pair is '
        f'{[*down.shape]} and {[*up.shape]}'
      )
    else:
      weights.check_finite(f'{name} of {adapter}', down, up)
      wide = np.asarray(up, np.float32) * np.float32(scale)
      pairs[weight] = np.asarray(down, np.float32), wide
  if faults:
    more = [] if len(faults) <= 8 else [f'and {len(faults) - 8} more']
    raise weights.CheckpointError(
      f'The adapter {adapter} does not fit {files.folder}: '
      f'{"; ".join([*faults[:8], *more])}. Give it the model that it was made '
      'for.'
    )
  return Adapted(files, pairs)


def statistics(checkpoint: str | pathlib.Path, adapter: str | None) -> Any:
  """Statistics of a fine-tuned model, by data set; None without a file."""
  for folder in tuned(checkpoint, adapter):
    if (folder / STATISTICS).exists():
      return weights.read_json(folder / STATISTICS)
  return None


def write_statistics(
  folder: pathlib.Path, norm_stats: Mapping[str, Any] | None
):
  """Writes statistics by data set; None writes nothing."""
  if norm_stats is not None:
    text = json.dumps(norm_stats, indent=2)
    (folder / STATISTICS).write_text(text)


def copy(
  folder: pathlib.Path,
  names: tuple[str, ...],
  checkpoint: str | pathlib.Path,
  adapter: str | None,
):
  """Copies files of a model; of those in both folders, the adapter's."""
  for source in reversed(tuned(checkpoint, adapter)):
    for name in names:
      if (source / name).is_file():
        shutil.copy(source / name, folder / name)


class Stored(NamedTuple):
  """A head's file.

  Attributes:
    name: of the file.
    tensors: as they are stored, by their names without `PARALLEL`.
    prefix: `PARALLEL`, or nothing.
  """

  name: str
  tensors: dict[str, np.ndarray]
  prefix: str


def heads(
  checkpoint: str | pathlib.Path, adapter: str | None = None
) -> dict[str, Stored]:
  """The heads of a model, by their names among the parameters.

  Args:
    checkpoint: folder of a model.
    adapter: folder of an adapter, named `lora_adapter`; a head beside it counts
      before that of the model. None without one.

  Raises:
    CheckpointError: for several files of one head, or one that is damaged.
  """
  found = {}
  for folder in reversed(tuned(checkpoint, adapter)):
    found |= _heads(folder)
  return found


def _heads(folder: pathlib.Path) -> dict[str, Stored]:
  found = {}
  for (part, stem), files in zip(FILES.items(), HEAD_FILES, strict=True):
    paths = sorted(folder.glob(files))
    if len(paths) > 1:
      raise weights.CheckpointError(
        f'{folder} has several files {stem} ({[x.name for x in paths]}): '
        'keep that of the step whose other files these are.'
      )
    for path in paths:
      tensors = torch_file.read(path)
      prefix = PARALLEL if all(k.startswith(PARALLEL) for k in tensors) else ''
      plain = {k.removeprefix(prefix): x for k, x in tensors.items()}
      found[part] = Stored(path.name, plain, prefix)
  return found


def write_heads(
  folder: pathlib.Path,
  params: base.Params,
  checkpoint: str | pathlib.Path,
  *,
  adapter: str | None = None,
):
  """Writes heads, trained or stored."""
  found = heads(checkpoint, adapter)
  for name in FILES:
    if name in found or name in params:
      file, tensors = _head_file(name, found.get(name), params)
      torch_file.write(folder / file, tensors)


def _head_file(
  part: str, stored: Stored | None, params: base.Params
) -> tuple[str, dict[str, np.ndarray]]:
  """The name and the tensors of a head's file: those stored, or trained."""
  if part not in params:
    return stored.name, {
      f'{stored.prefix}{key}': x for key, x in stored.tensors.items()
    }
  tensors = {}
  for key, theirs in NAMES[part].items():
    leaf = np.asarray(params[part][key]).T
    dtype = stored.tensors[theirs].dtype if stored else leaf.dtype
    tensors[theirs] = np.ascontiguousarray(leaf.astype(dtype))
  order = [*(stored.tensors if stored else tensors)]
  prefix = stored.prefix if stored else PARALLEL
  name = stored.name if stored else f'{FILES[part]}--0_checkpoint.pt'
  return name, {f'{prefix}{key}': tensors[key] for key in order}
