"""OpenVLA-OFT's published checkpoints.

A folder has the files of an OpenVLA, whose statistics are in
dataset_statistics.json. The parts that OpenVLA does not have are files of torch
beside them: `proprio_projector--STEP_checkpoint.pt` projects the state, and
`action_head--STEP_checkpoint.pt` is the L1 head. A model that writes tokens has
no such head. Towers with FiLM are in a file, too, see `film_files`.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from sharding import deferred
from stages import base
from stages import remat as remat_lib
from stages import settings as settings_lib
from stages.models.files import torch_file, weights
from stages.models.vision import vit
from stages.vla.openvla import (
  action_tokens,
  film_files,
  openvla_files,
  openvla_oft,
  openvla_oft_policy,
  tuning_files,
)
from stages.vla.openvla import film as film_lib


def read(
  checkpoint: str | pathlib.Path,
  *,
  adapter: str | None = None,
  chunk: int = 8,
  cameras: int = 1,
  data_set: str | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  towers: Mapping[str, vit.Config] = openvla_files.TOWERS,
  center_crop: bool = False,
) -> tuple[openvla_oft.Config, Any]:
  """The model that a folder describes, and its statistics by data set.

  Args:
    checkpoint: folder of a model.
    adapter: as for `tuning_files.heads` and `openvla_files.load_params`.
    chunk: Z, which no file says: 8 for LIBERO.
    cameras: number of pictures, which no file says either.
    data_set: whose actions it takes; None if it was trained on one.
    norm_stats: statistics by data set; None for those of the folder.
    dtype: as for `openvla_files.read`.
    remat: likewise.
    towers: likewise.
    center_crop: likewise.

  Raises:
    CheckpointError: if the folder describes no such model, or one with FiLM
      and an adapter.
  """
  own, stored = openvla_files.read(
    checkpoint,
    adapter=adapter,
    dtype=dtype,
    remat=remat,
    towers=towers,
    center_crop=center_crop,
  )
  norm_stats = stored if norm_stats is None else norm_stats
  found, film = tuning_files.heads(checkpoint, adapter), None
  for folder in tuning_files.tuned(checkpoint, adapter):
    film = film or film_files.file(folder)
  if film and adapter:
    raise weights.CheckpointError(
      f'{film} has vision towers with FiLM, beside which the adapter {adapter} '
      'cannot be trained further: add it to the weights of the checkpoint.'
    )
  O = 0
  if 'state_projector' in found:
    first = found['state_projector'].tensors.get('fc1.weight')
    O = first.shape[1] if first is not None and first.ndim == 2 else 1
  A = len(action_tokens.action_stats(norm_stats, data_set).q01)
  config = openvla_oft.Config(
    own,
    Z=chunk,
    A=A,
    O=O,
    cameras=cameras,
    head='l1' if 'l1_head' in found else 'token',
    film=film is not None,
  )
  return config, norm_stats


def load_params(
  checkpoint: str | pathlib.Path,
  config: openvla_oft.Config,
  *,
  adapter: str | None = None,
  new_heads: bool = False,
) -> base.Params:
  """The parameters of a checkpoint.

  Args:
    checkpoint: folder of a model.
    config: the model.
    adapter: as for `read`.
    new_heads: whether heads without a file are left out. FiLM without a file
      always is.

  Raises:
    CheckpointError: names all tensors of the heads, or all others, that are
      missing, extra or of another shape.
  """
  shapes = openvla_oft.param_shapes(config)
  found = tuning_files.heads(checkpoint, adapter)
  faults, own = [], {}
  for part in openvla_oft.heads(config):
    if part not in found and new_heads:
      continue
    if part not in found:
      faults.append(f'missing {tuning_files.FILES[part]}--STEP_checkpoint.pt')
      continue
    stored, names = found[part], tuning_files.NAMES[part]
    own[part] = {}
    for extra in sorted(stored.tensors.keys() - {*names.values()}):
      faults.append(f'extra {extra}')
    for key, leaf in shapes[part].items():
      tensor = stored.tensors.get(names[key])
      if tensor is None:
        faults.append(f'missing {names[key]}')
      elif tensor.T.shape != leaf.shape:
        want = [*leaf.shape[::-1]]
        faults.append(f'{names[key]} is {[*tensor.shape]}, expected {want}')
      else:
        tensor = np.asarray(tensor.T, leaf.dtype)
        weights.check_finite(f'{stored.name}: {names[key]}', tensor)
        own[part][key] = jax.device_put(tensor)
  if faults:
    raise weights.CheckpointError(
      f'{checkpoint} does not hold the heads of this model, whose actions have '
      f'{config.A} numbers: {"; ".join(faults)}.'
    )
  towers = film_files.file(checkpoint)
  if towers:
    own |= film_files.load_params(towers, config.openvla)
  return own | openvla_files.load_params(
    checkpoint,
    config.openvla,
    with_towers=towers is None,
    adapter=adapter,
  )


@settings_lib.passed_to(openvla_oft_policy.policy)
def policy_config_and_stats(
  checkpoint: str,
  *,
  adapter: str | None = None,
  chunk: int = 8,
  cameras: int = 1,
  data_set: str | None = None,
  head: openvla_oft.Head | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  new_heads: bool = False,
  film: bool = False,
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  towers: Mapping[str, vit.Config] = openvla_files.TOWERS,
  center_crop: bool = False,
  **settings,
) -> tuple[base.Policy, openvla_oft.Config, action_tokens.ActionStats]:
  """A policy from a checkpoint, the model, and statistics of its actions.

  The robot's state is normalized by the statistics.

  Args:
    checkpoint: folder of a model.
    adapter: as for `read`.
    chunk: as for `read`.
    cameras: likewise.
    data_set: likewise.
    head: 'token' to leave an L1 head aside; None for what the folder has.
    norm_stats: statistics by data set of a robot for which the model is
      trained further; None for those of the folder.
    new_heads: whether heads that the folder does not have get random values, to
      be trained: a projector of the state, if the statistics have a state, and
      an L1 head, if `head` asks for it.
    film: whether a model without FiLM gets one, to be trained, with which the
      towers see at first what they saw before. One that has it is read with it.
    dtype: as for `openvla_files.read`.
    remat: likewise.
    towers: likewise.
    center_crop: as for `read`.
    **settings: of `openvla_oft_policy.policy`.
  """
  config, norm_stats = read(
    checkpoint,
    adapter=adapter,
    chunk=chunk,
    cameras=cameras,
    data_set=data_set,
    norm_stats=norm_stats,
    dtype=dtype,
    remat=remat,
    towers=towers,
    center_crop=center_crop,
  )
  config = dataclasses.replace(
    config, head=head or config.head, film=film or config.film
  )
  stats = action_tokens.action_stats(norm_stats, data_set)
  state_stats = None
  if config.O or (new_heads and _has_state(norm_stats, data_set)):
    state_stats = action_tokens.action_stats(norm_stats, data_set, 'proprio')
    if new_heads and not config.O:
      config = dataclasses.replace(config, O=len(state_stats.q01))
  own = openvla_oft_policy.policy(
    config, stats, state_stats=state_stats, **settings
  )

  def init(key):
    params = own.init(key)
    if deferred.only_shapes(key):  # Only shapes are needed.
      return params
    own_params = load_params(
      checkpoint, config, adapter=adapter, new_heads=new_heads
    )
    return params | own_params

  return own._replace(init=init), config, stats


@settings_lib.passed_to(policy_config_and_stats)
def policy(checkpoint: str, **settings) -> base.Policy:
  """A policy from a checkpoint, see `policy_config_and_stats`."""
  return policy_config_and_stats(checkpoint, **settings)[0]


def _has_state(norm_stats: Any, data_set: str | None) -> bool:
  name = next(iter(norm_stats)) if data_set is None else data_set
  return 'proprio' in norm_stats[name]


def export(
  folder: str | pathlib.Path,
  params: base.Params,
  checkpoint: str | pathlib.Path,
  *,
  adapter: str | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  towers: Mapping[str, vit.Config] = openvla_files.TOWERS,
  shard_bytes: int = 5 * 2**30,
):
  """Writes trained parameters as a checkpoint in the published layout.

  Args:
    folder: folder to write.
    params: parameters of the policy; its critic is left out.
    checkpoint: the original model, for its types and names, and for all that
      the policy does not have.
    adapter: as for `openvla_files.export`.
    norm_stats: likewise.
    towers: as for `read`.
    shard_bytes: maximum bytes of tensors in one file.
  """

  def finish(part: pathlib.Path):
    tuning_files.write_heads(part, params, checkpoint, adapter=adapter)
    if openvla_oft.FILM in params:
      file, tensors = _film_file(checkpoint, params, towers)
      torch_file.write(part / file, tensors)

  elsewhere = {*tuning_files.FILES}
  if openvla_oft.FILM in params:
    elsewhere |= {openvla_oft.FILM, *film_lib.TOWERS}
  own = {k: x for k, x in params.items() if k not in elsewhere}
  openvla_files.export(
    folder,
    own,
    checkpoint,
    adapter=adapter,
    norm_stats=norm_stats,
    towers=towers,
    shard_bytes=shard_bytes,
    finish=finish,
  )


def _film_file(
  checkpoint: str | pathlib.Path,
  params: base.Params,
  towers: Mapping[str, vit.Config],
) -> tuple[str, dict[str, np.ndarray]]:
  """The name and the tensors of the file of towers with FiLM."""
  config = openvla_files.read(checkpoint, towers=towers).config
  path = film_files.file(checkpoint)
  stored = film_files.read(path) if path else film_files.new(checkpoint, config)
  return stored.path.name, film_files.trained(stored, params, config)
