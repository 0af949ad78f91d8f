"""OpenVLA in environments that return a picture."""

from collections.abc import Callable, Collection, Mapping
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stages import base, ranges, tree_paths
from stages import settings as settings_lib
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.models import adapters
from stages.models import lora as lora_lib
from stages.models.files import weights_writer
from stages.vla import frozen_parts, instructions, trunk_lora
from stages.vla.openvla import (
  action_tokens,
  openvla,
  openvla_files,
  openvla_policy,
  tuning_files,
)

LLAMA = 'llama'
# Keys of the parts that may be frozen, see `frozen_parts`.
PARTS = {
  'vision': ('dino', 'siglip'),
  'projector': ('projector',),
  'language': (LLAMA,),
}


@settings_lib.passed_to(openvla_policy.policy)
def policy(
  env: env_lib.Env,
  *,
  config: openvla.Config,
  instruction: tuple[int, ...] | None = None,
  camera: str = 'image/table',
  chunk: ranges.PositiveInt = 1,
  frozen: tuple[frozen_parts.Part, ...] = (),
  lora: lora_lib.Lora | None = None,
  **settings,
) -> base.Policy:
  """A policy for an environment whose observations contain a picture.

  It has an `imitation_loss`, so that `behavior_cloning` trains it by
  demonstrated actions: the negative log-likelihood of their tokens.

  Args:
    env: the environment. The bounds of its actions are −1 and 1 of the model.
    config: the model.
    instruction: tokens of the one of all environments, BOS first; None for
      those of observations, see `instructions`.
    camera: path of the picture in observations.
    chunk: Z, steps of the environment that are decided at a time, one token
      after the other. The environment's action is [Z, A] if Z > 1.
    frozen: parts that are not trained, see `frozen_parts`.
    lora: new adapters that are trained in place of the weights; None to train
      the weights.
    **settings: of `openvla_policy.policy`.

  Raises:
    ValueError: if observations have no such picture, or no instruction.
  """
  check_camera(env, camera)
  instructions.check_env(env, instruction)
  low, high = map(np.asarray, action_range.bounds(env, chunk))
  stats = action_tokens.ActionStats(low, high, np.ones(low.shape, bool))
  own = openvla_policy.policy(config, stats, chunk=chunk, **settings)
  own = partly_trained(own, frozen, lora)
  own = adapt(
    own, functools.partial(_observe, camera, instruction), camera, chunk
  )

  def to_env_action(action):
    action_BA = own.to_env_action(action)
    if chunk == 1:
      return action_BA
    return action_BA.reshape(*action_BA.shape[:-1], chunk, -1)

  return own._replace(to_env_action=to_env_action)


@settings_lib.passed_to(openvla_files.policy_and_stats)
def pretrained(
  env: env_lib.Env | None,
  *,
  checkpoint: str,
  instruction: tuple[int, ...] | None = None,
  camera: str = 'image/table',
  frozen: tuple[frozen_parts.Part, ...] = (),
  lora: lora_lib.Lora | None = None,
  **settings,
) -> base.Policy:
  """A policy from a checkpoint, one action at a time.

  Actions are in the units of the checkpoint's data set, or of `norm_stats`,
  within the bounds of the environment; demonstrated ones are −1 … 1 between its
  quantiles.

  Args:
    env: the environment; None for data of a robot without one.
    checkpoint: folder of a model.
    instruction: as for `policy`.
    camera: likewise.
    frozen: likewise.
    lora: adapters that are trained in place of the weights; None to train the
      weights. Of an adapter to start from, the matrices outside layers of the
      language model are added to the weights.
    **settings: of `openvla_files.policy_and_stats`.

  Raises:
    ValueError: if the model does not fit the observations or the actions, or
      for a `chunk` of several actions.
  """
  if (chunk := settings.get('chunk', 1)) != 1:
    raise ValueError(
      f'chunk is {chunk}, and a checkpoint of OpenVLA decides one action in a '
      'step: leave it out, or take an OpenVLA-OFT.'
    )
  if env is not None:
    check_camera(env, camera)
    instructions.check_env(env, instruction)
  own, stats = openvla_files.policy_and_stats(
    checkpoint, adapter=lora.adapter if lora else None, **settings
  )
  if env is not None:
    check_actions(env, len(stats.q01))
  own = partly_trained(own, frozen, lora)
  own = adapt(own, functools.partial(_observe, camera, instruction), camera, 1)
  return own if env is None else within_bounds(own, env)


@settings_lib.passed_to(openvla_files.export)
def export(
  folder: str | pathlib.Path,
  params: Mapping[str, Any],
  *,
  checkpoint: str,
  merge_lora: bool = True,
  adapter: str | None = None,
  norm_stats: Mapping[str, Any] | None = None,
  **settings,
):
  """Writes what a workflow has trained as a checkpoint.

  Args:
    folder: folder to write.
    params: what `Workflow.params` returns.
    checkpoint: the original model.
    merge_lora: whether adapters are added to the weights; else the folder has a
      `lora_adapter` in PEFT's layout, and no weights.
    adapter: folder of the adapter that training started from; None for a new
      one.
    norm_stats: as for `openvla_files.export`.
    **settings: of `openvla_files.export`.
  """
  if lora_lib.is_adapted(params['policy']) and not merge_lora:
    export_apart(folder, params['policy'], checkpoint, adapter, norm_stats)
    return
  own = trunk_lora.merge_if_adapted(params['policy'], part=LLAMA)
  own = frozen_parts.join(own)
  openvla_files.export(
    folder,
    own,
    checkpoint,
    adapter=adapter,
    norm_stats=norm_stats,
    **settings,
  )


def partly_trained(
  own: base.Policy,
  frozen: tuple[frozen_parts.Part, ...],
  lora: lora_lib.Lora | None,
  others: Collection[str] = (),
) -> base.Policy:
  """The policy with frozen parts, or with adapters in its language model.

  Args:
    own: the policy.
    frozen: parts that are not trained.
    lora: adapters, see `trunk_lora`; None or rank 0 for none.
    others: names of what the model has beside OpenVLA's parts.

  Raises:
    ValueError: see `frozen_parts.check`.
  """
  frozen_parts.check(frozen, lora, others)
  if not lora:
    return frozen_parts.freeze(own, frozen, PARTS)
  names = tuple(itertools.chain(*PARTS.values()))
  return trunk_lora.wrap(own, lora, names, LLAMA, tuning_files.PREFIX)


def export_apart(
  folder: str | pathlib.Path,
  params: base.Params,
  checkpoint: str,
  adapter: str | None,
  norm_stats: Mapping[str, Any] | None,
  finish: Callable[[pathlib.Path], None] = lambda part: None,
):
  """Writes a folder with the adapter alone, and the files beside it.

  Args:
    folder: folder to write.
    params: parameters of the policy.
    checkpoint: the model that is adapted.
    adapter: that which training started from; None for a new one.
    norm_stats: as for `export`.
    finish: writes further files into the folder before it is complete.
  """
  with weights_writer.new_folder(pathlib.Path(folder)) as part:
    adapters.write(
      part / tuning_files.FOLDER,
      trunk_lora.of_part(params, part=LLAMA),
      checkpoint,
      prefix=tuning_files.PREFIX,
      start=adapter,
    )
    tuning_files.copy(part, openvla_files.COMPANIONS, checkpoint, adapter)
    tuning_files.write_statistics(part, norm_stats)
    finish(part)


def within_bounds(own: base.Policy, env: env_lib.Env) -> base.Policy:
  """The policy with actions that the environment accepts."""
  low, high = map(np.asarray, action_range.bounds(env))

  def to_env_action(action):
    numbers = own.to_env_action(action)
    return jnp.clip(
      numbers,
      action_range.broadcast(low, numbers),
      action_range.broadcast(high, numbers),
    )

  return own._replace(to_env_action=to_env_action)


def adapt(
  own: base.Policy, observe: Callable, camera: str, chunk: int
) -> base.Policy:
  """A policy of the model's observations, as one of an environment's.

  Args:
    own: a policy of [B] rows, with an `imitation_loss` of actions [B, Z A].
    observe: observations of an environment, with any leading dimensions, to
      those of the model, with one.
    camera: path of a picture in the environment's observations.
    chunk: Z, actions of a demonstration.
  """

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    x = own.act(
      params, observe(obs), key_B, group_size=group_size, greedy=greedy
    )
    return x._replace(obs=obs)

  def evaluate(params, obs, action, *, group_size=1):
    rows = action.reshape(-1, action.shape[-1])
    now = own.evaluate(params, observe(obs), rows, group_size=group_size)
    return jax.tree.map(
      lambda x: x.reshape(*action.shape[:-1], *x.shape[1:]), now
    )

  def value(params, obs):
    leading = tree_paths.flatten(obs)[camera].shape[:-3]
    values = own.value(params, observe(obs))
    return values.reshape(*leading, *values.shape[1:])

  def imitation_loss(params, obs, action, key_B, *, train=False):
    action_range.check_chunk(action, chunk)
    action_BA = action.reshape(*action.shape[:1], -1)
    return own.imitation_loss(
      params, observe(obs), action_BA, key_B, train=train
    )

  return own._replace(
    act=act,
    evaluate=evaluate,
    value=value if own.value else None,
    imitation_loss=imitation_loss,
  )


def check_camera(env: env_lib.Env, camera: str):
  """Refuses an environment that does not return such a picture."""
  found = tree_paths.flatten(env.obs_spec)
  spec = found.get(camera)
  if spec is None or spec.dtype != jnp.uint8 or len(spec.shape) != 3:
    raise ValueError(
      f'OpenVLA reads the picture {camera!r}, uint8 [rows, columns, colors], '
      f'and the environment returns {[*found]}: give `camera` the path of a '
      'picture, or configure the environment to return one.'
    )


def check_actions(env: env_lib.Env, A: int):
  """Refuses an environment whose actions are not `A` numbers."""
  action_range.check_continuous(env)
  if len(env.action_low) != A:
    raise ValueError(
      f'The environment takes actions of {len(env.action_low)} numbers, and '
      f'the model writes {A}: set A of its config, or take a checkpoint of a '
      'robot with such actions.'
    )


def _observe(camera: str, instruction: tuple[int, ...] | None, obs):
  """The observations of OpenVLA, with all leading dimensions as one."""
  found = tree_paths.flatten(obs)
  image = found[camera].reshape(-1, *found[camera].shape[-3:])
  return openvla_policy.Observation(
    image, instructions.from_observation(found, instruction, len(image))
  )
