"""OpenVLA's published checkpoints in Hugging Face format.

A folder has the tensors in one or several safetensors files, config.json with
the statistics of actions by data set, or these in dataset_statistics.json.
Vision towers have the names of timm. Their last layers, norms and pooling are
stored and read by nothing; an export copies them.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from sharding import deferred
from stages import base
from stages import remat as remat_lib
from stages import settings as settings_lib
from stages.language import huggingface
from stages.models import families
from stages.models.files import config_check, weights, weights_writer
from stages.models.files.naming import Names, Tensor
from stages.models.vision import names as vision_names
from stages.models.vision import vit
from stages.vla import picture_files
from stages.vla.openvla import (
  action_tokens,
  openvla,
  openvla_policy,
  openvla_settings,
  tuning_files,
)

COMPANIONS = (
  *huggingface.COMPANIONS,
  tuning_files.STATISTICS,
  picture_files.FILE,
  'processor_config.json',
  'configuration_prismatic.py',
  'modeling_prismatic.py',
  'processing_prismatic.py',
)
PREFIXES = {
  'dino': 'vision_backbone.featurizer.',
  'siglip': 'vision_backbone.fused_featurizer.',
}
# Vision towers with FiLM, which are OpenVLA-OFT's, see `film_files`.
FILM_FILES = 'vision_backbone--*_checkpoint.pt'
# Vision towers by their names in timm.
TOWERS = {
  'vit_large_patch14_reg4_dinov2.lvd142m': openvla.DINO,
  'vit_so400m_patch14_siglip_224': openvla.SIGLIP,
  'vit_so400m_patch14_siglip_384': openvla.SIGLIP,
}
CROP = 0.9  # Share of a picture's area that evaluations show.


class Model(NamedTuple):
  """A published model, but for its parameters.

  Attributes:
    config: its parts.
    norm_stats: statistics by data set, see `action_tokens.action_stats`.
  """

  config: openvla.Config
  norm_stats: Any


def read(
  checkpoint: str | pathlib.Path,
  *,
  adapter: str | None = None,
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  towers: Mapping[str, vit.Config] = TOWERS,
  center_crop: bool = False,
) -> Model:
  """The model that a folder describes.

  Args:
    checkpoint: folder of a model of type 'openvla'.
    adapter: folder of an adapter, beside whose `lora_adapter` are statistics.
    dtype: type of the arithmetic; that of the checkpoint if None, or bfloat16
      for one in float16.
    remat: as in `transformer.Config`.
    towers: vision towers by their names in timm.
    center_crop: whether the model sees the central 90 % of pictures, as in
      evaluations of models that were trained on random crops of this size.

  Raises:
    CheckpointError: names all settings that are wrong or not supported.
  """
  raw, path = huggingface.raw_config(checkpoint)
  config_check.check_identity(raw, path)
  if raw.get('model_type') != 'openvla':
    # LeRobot, which has pi0, says `type`.
    found = raw.get('model_type') or raw.get('type')
    raise weights.CheckpointError(
      f'{path} describes a model of type {found!r}, expected '
      "'openvla': give the folder of an OpenVLA or OpenVLA-OFT."
    )
  faults = [*config_check.wrong(raw, openvla_settings.SETTINGS)]
  faults = faults or [*openvla_settings.unsupported(raw, towers)]
  if faults:
    raise weights.CheckpointError(
      f'{path} cannot describe an OpenVLA: {"; ".join(faults)}.'
    )
  stored = raw.get('dtype') or raw.get('torch_dtype')
  text = {'model_type': 'llama'} | raw['text_config']
  text |= {'dtype': stored} if stored else {}
  llama = families.read(text, path, dtype=dtype, remat=remat)
  sizes = tuple(raw['image_sizes'])
  crop = {'crop': CROP} if center_crop else {}
  own = {'dtype': llama.dtype, 'remat': remat}
  try:
    dino, siglip = (
      dataclasses.replace(_tower(towers[name], args), image_size=size, **own)
      for name, size, args in zip(
        raw['timm_model_ids'],
        sizes,
        raw.get(openvla_settings.TOWER_ARGS) or ({}, {}),
        strict=True,
      )
    )
    config = openvla.Config(
      dino,
      siglip,
      llama,
      raw.get('pad_to_multiple_of', 64),
      raw.get('n_action_bins', 256),
      dataclasses.replace(
        picture_files.read(
          checkpoint, sizes, raw.get('image_resize_strategy', 'letterbox')
        ),
        **crop,
      ),
    )
  except weights.CheckpointError:
    raise
  except ValueError as error:
    raise weights.CheckpointError(
      f'{path} cannot describe an OpenVLA: {error}'
    ) from error
  tuned = tuning_files.statistics(checkpoint, adapter)
  return Model(config, raw.get('norm_stats') if tuned is None else tuned)


def _tower(published: vit.Config, args: Mapping[str, Any]) -> vit.Config:
  """A tower with other sizes than the published one."""
  sizes = {openvla_settings.TIMM_SIZES[key]: x for key, x in args.items()}
  if 'F' in sizes:
    sizes['F'] = round(sizes['F'] * sizes.get('D', published.D))
  return dataclasses.replace(published, **sizes)


def names(config: openvla.Config) -> Names:
  """The tensor of a checkpoint that holds each parameter, by part."""
  del config  # Sizes alone differ.
  projector = {}
  maps = ('in', 'OF'), ('middle', 'FD'), ('out', 'OD')
  for i, (name, letters) in enumerate(maps, 1):
    stem = f'projector.fc{i}'
    projector[f'{name}_{letters}'] = Tensor(f'{stem}.weight', 1)
    projector[f'{name}_bias_{letters[1]}'] = Tensor(f'{stem}.bias')
  # transformers would rename a parameter called gamma, so OpenVLA did.
  renamed = {'gamma': 'scale_factor'}
  towers = {
    part: vision_names.prefixed(vision_names.TIMM, prefix, **renamed)
    for part, prefix in PREFIXES.items()
  }
  llama = vision_names.prefixed(
    families.FAMILIES['llama'].names, 'language_model.'
  )
  return towers | {'projector': projector, 'llama': llama}


def unread_stems(config: openvla.Config) -> tuple[str, ...]:
  """First parts of the names of tensors that no part of the model reads."""
  stems = []
  for part, prefix in PREFIXES.items():
    last = getattr(config, part).L - 1
    stems += [f'{prefix}{x}.' for x in (f'blocks.{last}', 'norm', 'attn_pool')]
  return tuple(stems)


def _unread(
  folder: str | pathlib.Path, config: openvla.Config, *, with_towers: bool
) -> frozenset:
  """Names of stored tensors that are not read.

  Args:
    folder: of the model.
    config: the model.
    with_towers: whether the towers are read from this folder's safetensors.
  """
  stems = unread_stems(config) if with_towers else tuple(PREFIXES.values())
  with contextlib.ExitStack() as stack:
    files = weights.TensorFiles(pathlib.Path(folder), stack)
    return frozenset(name for name in files.file_of if name.startswith(stems))


def load_params(
  checkpoint: str | pathlib.Path,
  config: openvla.Config,
  *,
  with_towers: bool = True,
  adapter: str | None = None,
):
  """The parameters of a checkpoint, each onto its devices.

  Args:
    checkpoint: folder of a model.
    config: the model.
    with_towers: whether those of the vision towers are among them.
    adapter: folder of one that is added outside the language model's layers.

  Raises:
    CheckpointError: names all missing, extra and wrongly shaped tensors.
  """
  shapes = openvla.param_shapes(config)
  if not with_towers:
    shapes = {k: x for k, x in shapes.items() if k not in PREFIXES}
  ignored = _unread(checkpoint, config, with_towers=with_towers)
  add = functools.partial(tuning_files.add, adapter=adapter, unread=ignored)
  return weights.load(
    checkpoint, shapes, names(config), ignored=ignored, seen_as=add
  )


@settings_lib.passed_to(openvla_policy.policy)
def policy_and_stats(
  checkpoint: str,
  *,
  adapter: str | None = None,
  data_set: str | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  towers: Mapping[str, vit.Config] = TOWERS,
  center_crop: bool = False,
  **settings,
) -> tuple[base.Policy, action_tokens.ActionStats]:
  """A policy from a checkpoint, and the statistics of its actions.

  Args:
    checkpoint: folder of a model of type 'openvla'.
    adapter: as for `load_params`.
    data_set: whose statistics actions are un-normalized by; None if the model
      has those of one alone.
    norm_stats: statistics by data set of a robot for which the model is
      trained further; None for those of the folder.
    dtype: as for `read`.
    remat: likewise.
    towers: likewise.
    center_crop: likewise.
    **settings: of `openvla_policy.policy`.

  Raises:
    CheckpointError: for a folder of another model, OpenVLA-OFT included.
  """
  _refuse_oft(checkpoint, adapter)
  config, stored = read(
    checkpoint,
    adapter=adapter,
    dtype=dtype,
    remat=remat,
    towers=towers,
    center_crop=center_crop,
  )
  norm_stats = stored if norm_stats is None else norm_stats
  stats = action_tokens.action_stats(norm_stats, data_set)
  own = openvla_policy.policy(config, stats, **settings)

  def init(key):
    params = own.init(key)
    if deferred.only_shapes(key):  # Only shapes are needed.
      return params
    return params | load_params(checkpoint, config, adapter=adapter)

  return own._replace(init=init), stats


def _refuse_oft(checkpoint: str | pathlib.Path, adapter: str | None):
  """Refuses an OpenVLA-OFT, known by files that would be left aside."""
  for folder in tuning_files.tuned(checkpoint, adapter):
    for files in (FILM_FILES, *tuning_files.HEAD_FILES):
      for path in sorted(folder.glob(files)):
        raise weights.CheckpointError(
          f'{folder} holds an OpenVLA-OFT, by its {path.name}, and an OpenVLA '
          'is expected, which has neither FiLM nor heads: read it by '
          '`openvla_oft_env.pretrained`, or give the folder of an OpenVLA.'
        )


@settings_lib.passed_to(policy_and_stats)
def policy(checkpoint: str, **settings) -> base.Policy:
  """A policy from a checkpoint, see `policy_and_stats`."""
  return policy_and_stats(checkpoint, **settings)[0]


def export(
  folder: str | pathlib.Path,
  params,
  checkpoint: str | pathlib.Path,
  *,
  adapter: str | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  towers: Mapping[str, vit.Config] = TOWERS,
  shard_bytes: int = 5 * 2**30,
  finish: Callable[[pathlib.Path], None] = lambda part: None,
):
  """Writes trained parameters as a checkpoint in the published format.

  Args:
    folder: folder to write.
    params: parameters of the policy; its critic is left out. Towers that are
      not among them are copied from the original.
    checkpoint: the original model, for its type, and for all that is not
      trained.
    adapter: folder of the adapter that training started from, see `read`.
    norm_stats: statistics by data set of what it was trained on; None for those
      of the original.
    towers: as for `read`.
    shard_bytes: maximum bytes of tensors in one file.
    finish: writes further files into the folder before it is complete.
  """
  source = pathlib.Path(checkpoint)
  raw, _ = huggingface.raw_config(source)
  config = read(source, towers=towers).config
  unread = _unread(source, config, with_towers='dino' in params)
  copied = tensors(source, lambda name: name in unread)
  own = {k: v for k, v in params.items() if k != base.CRITIC}
  with weights_writer.new_folder(pathlib.Path(folder)) as part:
    weights_writer.save(
      part,
      own | {'copied': copied},
      {**names(config), 'copied': {name: Tensor(name) for name in copied}},
      dtype=raw.get('dtype') or raw.get('torch_dtype') or 'float32',
      shard_bytes=shard_bytes,
    )
    (part / 'config.json').write_text(json.dumps(raw, indent=2))
    tuning_files.copy(part, COMPANIONS, source, adapter)
    tuning_files.write_statistics(part, norm_stats)
    finish(part)


def tensors(
  folder: pathlib.Path, wanted: Callable[[str], bool]
) -> dict[str, np.ndarray]:
  """Tensors of a checkpoint as they are stored, those with wanted names."""
  with contextlib.ExitStack() as stack:
    files = weights.TensorFiles(folder, stack)
    return {x: files.slice(x)[:] for x in sorted(files.file_of) if wanted(x)}
