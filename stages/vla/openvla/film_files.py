"""Vision towers with FiLM in OpenVLA-OFT's published files.

`vision_backbone--STEP_checkpoint.pt` holds both towers as they were fine-tuned,
and the projections of FiLM. They are read in place of those in the safetensors
of the folder, which have neither FiLM nor the towers' adapters. The linear maps
of the towers have adapters of `peft` in this file, which are added to their
weights as the file is read.
"""

from collections.abc import Iterator, Mapping
import pathlib
import re
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from stages import base
from stages.models.files import naming, torch_file, weights
from stages.models.files.naming import Tensor
from stages.models.vision import names as vision_names
from stages.vla.openvla import film, openvla, openvla_files, openvla_oft

MOST_ALPHA = 16  # Published adapters have an alpha of their rank, up to this.
NEW_RANK = 32  # Of adapters in a new file: what published code expects.
NEW_FILE = openvla_files.FILM_FILES.replace('*', '0')
BASE, DOWN, UP = 'base_layer', 'lora_A.default.weight', 'lora_B.default.weight'
BLOCK = re.compile(r'(\.blocks\.\d+)\.')
KINDS = {
  np.dtype(ml_dtypes.bfloat16): 'BF16',
  np.dtype(np.float16): 'F16',
  np.dtype(np.float32): 'F32',
  np.dtype(np.float64): 'F64',
}


class Stored(NamedTuple):
  """A file of towers with FiLM.

  Attributes:
    path: of the file.
    tensors: as they are stored.
  """

  path: pathlib.Path
  tensors: dict[str, np.ndarray]


class _Slice(NamedTuple):
  """A tensor in memory, with the methods of one in a safetensors file."""

  tensor: np.ndarray

  def __getitem__(self, index):
    return self.tensor[index]

  def get_shape(self):
    return self.tensor.shape

  def get_dtype(self):
    return KINDS[self.tensor.dtype]


class _Tensors(NamedTuple):
  """Tensors in memory, with the methods of `weights.TensorFiles`."""

  folder: pathlib.Path
  file_of: Mapping[str, np.ndarray]

  def slice(self, name: str) -> _Slice:
    return _Slice(self.file_of[name])


def file(checkpoint: str | pathlib.Path) -> pathlib.Path | None:
  """The file of towers with FiLM in a folder; None if it has none.

  Raises:
    CheckpointError: for several such files.
  """
  found = sorted(pathlib.Path(checkpoint).glob(openvla_files.FILM_FILES))
  if len(found) > 1:
    raise weights.CheckpointError(
      f'{checkpoint} has several files of towers with FiLM '
      f'({[x.name for x in found]}): keep that of the step whose other files '
      'these are.'
    )
  return found[0] if found else None


def read(path: pathlib.Path) -> Stored:
  """The tensors of such a file."""
  return Stored(path, torch_file.read(path))


def load_params(path: pathlib.Path, config: openvla.Config) -> base.Params:
  """Towers and FiLM of a file, adapters added to their weights.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors.
  """
  shapes = openvla.param_shapes(config)
  shapes = {name: shapes[name] for name in film.TOWERS}
  shapes[openvla_oft.FILM] = film.param_shapes(config)
  found = _merged(read(path).tensors)
  stems = openvla_files.unread_stems(config)
  unread = frozenset(name for name in found if name.startswith(stems))
  files = _Tensors(path, found)
  return weights.load_open(files, shapes, names(config), unread)


def names(config: openvla.Config) -> naming.Names:
  """The tensor of such a file for each parameter, by part."""
  towers, own = {}, {}
  plain = openvla_files.names(config)
  for part, prefix in openvla_files.PREFIXES.items():
    towers[part] = vision_names.prefixed(
      plain[part], '', **{'.{i}.': '.{i}.block.'}
    )
    own[part] = {}
    for kind in 'scale', 'shift':
      stem = f'{prefix}blocks.{{i}}.{kind}'
      own[part][f'{kind}_OD'] = Tensor(f'{stem}.weight', 1)
      own[part][f'{kind}_bias_D'] = Tensor(f'{stem}.bias')
  return towers | {openvla_oft.FILM: own}


def trained(
  stored: Stored, params: base.Params, config: openvla.Config
) -> dict[str, np.ndarray]:
  """The tensors of a file, with those that have changed in training.

  A weight with adapters that has changed is written as a whole, and the product
  of its adapters becomes zero. Tensors that have not changed are those of the
  file, as are those that no part of the model reads.
  """
  found, before = dict(stored.tensors), _merged(stored.tensors)
  own = {name: params[name] for name in (*film.TOWERS, openvla_oft.FILM)}
  for name, tensor in _flat(own, names(config)):
    if np.array_equal(np.asarray(before[name], tensor.dtype), tensor):
      continue
    module, _, kind = name.rpartition('.')
    if name not in found:
      name = f'{module}.{BASE}.{kind}'
      if kind == 'weight':
        found[f'{module}.{UP}'] = np.zeros_like(found[f'{module}.{UP}'])
    found[name] = np.ascontiguousarray(tensor.astype(found[name].dtype))
  return found


def new(checkpoint: str | pathlib.Path, config: openvla.Config) -> Stored:
  """A file for a model without one, with adapters and FiLM that do nothing.

  Published code reads files with adapters of rank 32 alone.

  Args:
    checkpoint: folder of the model, whose safetensors have the towers.
    config: the model.
  """
  prefixes = tuple(openvla_files.PREFIXES.values())
  towers = openvla_files.tensors(
    pathlib.Path(checkpoint), lambda name: name.startswith(prefixes)
  )
  rng, found = np.random.default_rng(0), {}
  maps = {
    name.removesuffix('.weight')
    for name, x in towers.items()
    if x.ndim == 2 and name.endswith('.weight')
  }
  for name, x in towers.items():
    module, _, kind = name.rpartition('.')
    inside = BLOCK.sub(r'\1.block.', module)
    if module not in maps:
      found[f'{inside}.{kind}' if module else kind] = x
      continue
    found[f'{inside}.{BASE}.{kind}'] = x
    if kind == 'weight':
      outs, ins = x.shape
      # As `peft` draws them, so that training can go on from here.
      down = rng.normal(scale=1 / NEW_RANK, size=(NEW_RANK, ins))
      found[f'{inside}.{DOWN}'] = down.astype(np.float32)
      found[f'{inside}.{UP}'] = np.zeros((outs, NEW_RANK), np.float32)
  for part, prefix in openvla_files.PREFIXES.items():
    tower = getattr(config, part)
    for i in range(tower.L):
      for kind in 'scale', 'shift':
        stem = f'{prefix}blocks.{i}.{kind}'
        shape = tower.D, config.llama.D
        found[f'{stem}.weight'] = np.zeros(shape, np.float32)
        found[f'{stem}.bias'] = np.zeros(tower.D, np.float32)
  return Stored(pathlib.Path(NEW_FILE), found)


def _merged(stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Tensors with adapters added: W + (α / r) B A, in float32 or wider."""
  found = {}
  for name, x in stored.items():
    if name.endswith((DOWN, UP)):
      continue
    module, _, kind = name.rpartition('.')
    if not module.endswith(f'.{BASE}'):
      found[name] = x
      continue
    module = module.removesuffix(f'.{BASE}')
    found[f'{module}.{kind}'] = x
    if kind == 'weight':
      found[f'{module}.weight'] = _added(stored, module, x)
  return found


def _added(stored: Mapping[str, np.ndarray], module: str, weight: np.ndarray):
  """A weight with its adapter added."""
  down, up = stored.get(f'{module}.{DOWN}'), stored.get(f'{module}.{UP}')
  if (
    down is None
    or up is None
    or (up.shape[:1] + down.shape[1:], up.shape[1:])
    != (weight.shape, down.shape[:1])
  ):
    raise weights.CheckpointError(
      f'{module} has no pair of adapters {DOWN} and {UP} that fit its '
      f'{BASE} of {[*weight.shape]}: copy the file again.'
    )
  wide = np.promote_types(np.float32, weight.dtype)
  down, up = down.astype(wide), up.astype(wide)
  rank = len(down)
  return weight.astype(wide) + min(rank, MOST_ALPHA) / rank * (up @ down)


def _flat(
  params: base.Params, own: naming.Names
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields names and tensors of a checkpoint, whole ones."""
  parts: dict[str, dict[Any, np.ndarray]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tensor = naming.tensor_of(own, path)
    leaf = np.asarray(leaf)
    for index, name in naming.parts_of(tensor, leaf.shape):
      part = naming.write_part(leaf[index] if index else leaf, tensor)
      parts.setdefault(name, {})[tensor.part] = part
  for name, found in parts.items():
    yield name, np.concatenate([found[key] for key in sorted(found)])
