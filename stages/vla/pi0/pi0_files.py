"""Checkpoints of π0 and π0.5 in safetensors, as LeRobot and openpi write them.

Both name tensors alike, but for a few prefixes: LeRobot puts `model.` before
all names, some versions of transformers put `vision_model.` before those of
SigLIP, and the embedding, which is the output layer too, is stored under either
name. `read` finds out which. Both load a single file, and expect the output
layers in it, which they do not use.
"""

import contextlib
import pathlib
from typing import NamedTuple

import numpy as np

from stages.models.files import decoder_names, weights, weights_writer
from stages.models.files.naming import Names, Tensor
from stages.models.vision import names as vision_names
from stages.vla import lerobot_processors
from stages.vla.pi0 import adaptive, pi0

ROOT = 'paligemma_with_expert.'
PALIGEMMA, EXPERT = f'{ROOT}paligemma.', f'{ROOT}gemma_expert.'
TRUNK = f'{PALIGEMMA}model.language_model.'
TOWER = f'{PALIGEMMA}model.vision_tower.'
PROJECTOR = f'{PALIGEMMA}model.multi_modal_projector.linear'
EMBEDDINGS = f'{TRUNK}embed_tokens.weight', f'{PALIGEMMA}lm_head.weight'
EXPERT_HEAD = f'{EXPERT}lm_head.weight'  # Stored, and used by nothing.
# A layer of each family that the other one does not have.
OWN = {'π0': 'action_time_mlp_in.weight', 'π0.5': 'time_mlp_in.weight'}


class Layout(NamedTuple):
  """In what the names of checkpoints differ.

  Attributes:
    root: what all names begin with.
    tower: what those of the vision tower's modules begin with.
    embedding: name of the embedding.
  """

  root: str = 'model.'
  tower: str = 'vision_model.'
  embedding: str = EMBEDDINGS[1]


def read(folder: str | pathlib.Path, config: pi0.Config):
  """Reads the parameters of a checkpoint, each onto its devices.

  Args:
    folder: with `model.safetensors`, or several such files and their index.
    config: sizes of the model.

  Raises:
    CheckpointError: names the family that the folder holds, if that is another,
      or else all tensors that are missing, extra or of another shape than those
      of `config`.
  """
  _check_family(folder, config)
  layout = layout_of(folder)
  unread = {f'{layout.root}{name}' for name in (*EMBEDDINGS, EXPERT_HEAD)}
  unread |= {x for x in _stored(folder) if lerobot_processors.is_buffer(x)}
  return weights.load(
    folder,
    pi0.param_shapes(config),
    names(config, layout),
    ignored=frozenset(unread),
  )


def write(
  folder: str | pathlib.Path,
  params,
  config: pi0.Config,
  *,
  layout: Layout = Layout(),
  dtype: str = 'float32',
):
  """Writes parameters as a checkpoint, in one file.

  The expert's output layer, which nothing uses, is zeros.

  Args:
    folder: where to write; made if needed.
    params: of both networks.
    config: sizes of the model.
    layout: how tensors are named.
    dtype: the type to write them in.
  """
  own = names(config, layout)
  own['expert'] |= {'head_VD': Tensor(f'{layout.root}{EXPERT_HEAD}')}
  head_VD = np.zeros((config.trunk.V, config.expert.D), np.float32)
  params = params | {'expert': params['expert'] | {'head_VD': head_VD}}
  weights_writer.save(folder, params, own, dtype=dtype, shard_bytes=None)


def layout_of(folder: str | pathlib.Path) -> Layout:
  """Finds out how a checkpoint names its tensors."""
  stored = _stored(folder)
  root = 'model.' if any(x.startswith(f'model.{ROOT}') for x in stored) else ''
  tower = f'{root}{TOWER}vision_model.'
  return Layout(
    root,
    'vision_model.' if any(x.startswith(tower) for x in stored) else '',
    next((x for x in EMBEDDINGS if f'{root}{x}' in stored), EMBEDDINGS[0]),
  )


def is_adaptive(folder: str | pathlib.Path) -> bool:
  """Whether a checkpoint is of π0.5, by a layer that π0 does not have."""
  return OWN['π0.5'] in _bare(folder)


def _check_family(folder: str | pathlib.Path, config: pi0.Config):
  """Refuses a checkpoint of another family than that of `config`."""
  stored, wanted = _bare(folder), 'π0.5' if config.adaptive else 'π0'
  if not any(name.startswith(ROOT) for name in stored):
    described = pathlib.Path(folder) / 'config.json'
    raw = weights.read_json(described) if described.is_file() else {}
    found = raw.get('model_type') or raw.get('type')
    found = f'a model of type {found!r}' if found else 'another model'
    raise weights.CheckpointError(
      f'{folder} holds {found}, expected {wanted}, whose tensors have names '
      f'with {ROOT!r}: give the folder of a {wanted} in safetensors, as '
      'LeRobot or openpi write it.'
    )
  held = [name for name, layer in OWN.items() if layer in stored]
  if held and wanted not in held:
    raise weights.CheckpointError(
      f'{folder} holds a {held[0]}, expected a {wanted}: give the folder of a '
      f'{wanted}, or set `pi0.Config.adaptive` to {not config.adaptive}, which '
      f'makes the model a {held[0]}.'
    )


def _bare(folder: str | pathlib.Path) -> set[str]:
  """Names of a checkpoint's tensors, without what LeRobot puts before all."""
  return {name.removeprefix('model.') for name in _stored(folder)}


def _stored(folder: str | pathlib.Path) -> set[str]:
  """Names of a checkpoint's tensors."""
  with contextlib.ExitStack() as stack:
    return {*weights.TensorFiles(pathlib.Path(folder), stack).file_of}


def names(config: pi0.Config, layout: Layout) -> Names:
  """The checkpoint tensor of each parameter."""
  root = layout.root
  time = 'time_mlp' if config.adaptive else 'action_time_mlp'
  expert = _transformer(f'{root}{EXPERT}model.')
  if config.adaptive:
    expert |= _adaptive('norm', f'{root}{EXPERT}model.norm.dense')
    layer = f'{root}{EXPERT}{decoder_names.LAYER}.'
    expert |= _adaptive('before_attention', f'{layer}input_layernorm.dense')
    expert |= _adaptive(
      'before_feedforward', f'{layer}post_attention_layernorm.dense'
    )
  for ours, theirs in {
    'action_in_AD': 'action_in_proj',
    'action_out_DA': 'action_out_proj',
    'state_OD': 'state_proj',
    'time_in_OD': f'{time}_in',
    'time_out_FD': f'{time}_out',
  }.items():
    expert |= _affine(ours, f'{root}{theirs}')
  embedding = {'embed_VD': Tensor(f'{root}{layout.embedding}')}
  return {
    'vision': vision_names.prefixed(
      vision_names.SIGLIP, f'{root}{TOWER}{layout.tower}'
    ),
    'projector': _affine('out_OD', f'{root}{PROJECTOR}'),
    'trunk': _transformer(f'{root}{TRUNK}') | embedding,
    'expert': expert,
  }


def _transformer(prefix: str) -> dict[str, Tensor]:
  """A transformer's tensors, which `decoder_names` has under `model.`."""
  return {
    key: tensor._replace(name=f'{prefix}{tensor.name.removeprefix("model.")}')
    for key, tensor in decoder_names.NAMES.items()
  }


def _affine(parameter: str, name: str, part=None) -> dict[str, Tensor]:
  """Weights and bias of an affine map, or a part of them."""
  stem, letters = parameter.rsplit('_', 1)
  return {
    parameter: Tensor(f'{name}.weight', 1, part=part),
    f'{stem}_bias_{letters[1]}': Tensor(f'{name}.bias', 0, part=part),
  }


def _adaptive(norm: str, name: str) -> dict[str, Tensor]:
  """Parameters of an adaptive norm, the three parts of one affine map."""
  parts = adaptive.PARTS
  found = {}
  for n, part in enumerate(parts):
    found |= _affine(f'{norm}_{part}_OD', name, (n, len(parts)))
  return found
