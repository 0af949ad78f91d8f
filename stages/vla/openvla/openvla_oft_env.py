"""OpenVLA-OFT in environments that return pictures."""

from collections.abc import Mapping
import functools
import pathlib
from typing import Any

import numpy as np

from stages import base, ranges, tree_paths
from stages import settings as settings_lib
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.models import lora as lora_lib
from stages.vla import frozen_parts, instructions, trunk_lora
from stages.vla.openvla import (
  action_tokens,
  openvla_env,
  openvla_oft,
  openvla_oft_files,
  openvla_oft_policy,
  tuning_files,
)


@settings_lib.passed_to(openvla_oft_policy.policy)
def policy(
  env: env_lib.Env,
  *,
  config: openvla_oft.Config,
  instruction: tuple[int, ...] | None = None,
  cameras: tuple[str, ...] = ('image/table',),
  state: str | None = None,
  frozen: tuple[frozen_parts.Part, ...] = (),
  lora: lora_lib.Lora | None = None,
  **settings,
) -> base.Policy:
  """A policy for an environment whose observations contain pictures.

  It decides `config.Z` actions at a time, and has an `imitation_loss`: of the
  tokens' negative log-likelihood, or of the L1 head's mean error.

  Args:
    env: the environment. The bounds of its actions are −1 and 1 of the model.
    config: the model.
    instruction: tokens of the one of all environments, BOS first; None for
      those of observations, see `instructions`.
    cameras: paths of the pictures in observations, the main one first.
    state: path of the robot's state, which is read as it is; None for none.
    frozen: parts that are not trained, see `frozen_parts`.
    lora: new adapters that are trained in place of the weights; None to train
      the weights.
    **settings: of `openvla_oft_policy.policy`.

  Raises:
    ValueError: if the model does not fit the observations or the actions.
  """
  for camera in cameras:
    openvla_env.check_camera(env, camera)
  instructions.check_env(env, instruction)
  _check(env, config, cameras, state)
  low, high = map(np.asarray, action_range.bounds(env))
  stats = action_tokens.ActionStats(low, high, np.ones(low.shape, bool))
  own = openvla_oft_policy.policy(config, stats, **settings)
  own = openvla_env.partly_trained(own, frozen, lora, _others(config))
  observe = functools.partial(_observe, cameras, instruction, state)
  own = openvla_env.adapt(own, observe, cameras[0], config.Z)
  return _within_bounds(own, env, config.Z)


@settings_lib.passed_to(openvla_oft_files.policy_config_and_stats)
def pretrained(
  env: env_lib.Env | None,
  *,
  checkpoint: str,
  instruction: tuple[int, ...] | None = None,
  cameras: tuple[str, ...] = ('image/table',),
  state: str = 'state',
  chunk: ranges.PositiveInt = 8,
  frozen: tuple[frozen_parts.Part, ...] = (),
  lora: lora_lib.Lora | None = None,
  **settings,
) -> base.Policy:
  """A policy from a checkpoint, for an environment or for data of a robot.

  Actions are in the units of the checkpoint's data set, or of `norm_stats`;
  demonstrated ones are −1 … 1 between its quantiles.

  Args:
    env: the environment; None without one.
    checkpoint: folder of a model.
    instruction: as for `policy`.
    cameras: likewise.
    state: path of the robot's state, in the units of the data set; read by
      models with a projector of the state alone.
    chunk: Z, which no file says.
    frozen: as for `policy`.
    lora: adapters that are trained in place of the weights, as for
      `openvla_env.pretrained`; None to train the weights.
    **settings: of `openvla_oft_files.policy`.

  Raises:
    ValueError: if the model does not fit the observations or the actions.
  """
  own, config, stats = openvla_oft_files.policy_config_and_stats(
    checkpoint,
    adapter=lora.adapter if lora else None,
    chunk=chunk,
    cameras=len(cameras),
    **settings,
  )
  own = openvla_env.partly_trained(own, frozen, lora, _others(config))
  read_state = state if config.O else None
  if env is not None:
    for camera in cameras:
      openvla_env.check_camera(env, camera)
    instructions.check_env(env, instruction)
    _check(env, config, cameras, read_state)
    _check_gripper(env, stats)
  observe = functools.partial(_observe, cameras, instruction, read_state)
  own = openvla_env.adapt(own, observe, cameras[0], config.Z)
  return own if env is None else _within_bounds(own, env, config.Z)


@settings_lib.passed_to(openvla_oft_files.export)
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
    merge_lora: as for `openvla_env.export`.
    adapter: likewise.
    norm_stats: likewise.
    **settings: of `openvla_oft_files.export`.

  Raises:
    ValueError: for FiLM with adapters that are not merged.
  """
  policy = params['policy']
  if lora_lib.is_adapted(policy) and not merge_lora:
    if openvla_oft.FILM in policy:
      raise ValueError(
        'A model with FiLM is exported whole: leave out merge_lora = False.'
      )
    openvla_env.export_apart(
      folder,
      policy,
      checkpoint,
      adapter,
      norm_stats,
      lambda part: tuning_files.write_heads(
        part, policy, checkpoint, adapter=adapter
      ),
    )
    return
  own = trunk_lora.merge_if_adapted(params['policy'], part=openvla_env.LLAMA)
  own = frozen_parts.join(own)
  openvla_oft_files.export(
    folder,
    own,
    checkpoint,
    adapter=adapter,
    norm_stats=norm_stats,
    **settings,
  )


def _others(config: openvla_oft.Config) -> tuple[str, ...]:
  """Names of the parts that OpenVLA does not have."""
  film = (openvla_oft.FILM,) if config.film else ()
  return (*openvla_oft.heads(config), *film)


def _within_bounds(own: base.Policy, env: env_lib.Env, Z: int) -> base.Policy:
  """The policy with actions that the environment accepts."""
  # The L1 head may leave the range, and a data set may exceed it.
  own = openvla_env.within_bounds(own, env)
  if Z > 1:
    return own
  return own._replace(
    to_env_action=lambda action: own.to_env_action(action)[..., 0, :]
  )


def _check(
  env: env_lib.Env,
  config: openvla_oft.Config,
  cameras: tuple[str, ...],
  state: str | None,
):
  openvla_env.check_actions(env, config.A)
  if len(cameras) != config.cameras:
    raise ValueError(
      f'The model reads {config.cameras} pictures, and {[*cameras]} are named: '
      'name as many cameras, the main one first.'
    )
  found = tree_paths.flatten(env.obs_spec)
  got = 0
  if state is not None:
    if state not in found or len(found[state].shape) != 1:
      raise ValueError(
        f'The environment returns {[*found]}, and no vector {state!r}: give '
        '`state` the path of one, or None.'
      )
    got = found[state].shape[0]
  if got != config.O:
    raise ValueError(
      f'The model reads a state of {config.O} numbers, and {state!r} has '
      f'{got}: set O of its config.'
    )


def _check_gripper(env: env_lib.Env, stats: action_tokens.ActionStats):
  """Refuses a gripper of −1 … 1 where the environment's is 0 … 1.

  The two are opposite: in LIBERO's own data −1 opens it, and in OpenVLA's
  version of them 1 does, and 0 closes it.
  """
  low, high = (np.asarray(x)[-1] for x in action_range.bounds(env))
  trained = stats.q01[-1], stats.q99[-1]
  if (low, high) == (0.0, 1.0) and np.allclose(trained, (-1.0, 1.0)):
    raise ValueError(
      'The last number of actions, the gripper, is −1 … 1 in the statistics of '
      'the model, as in data in which −1 opens it, and the environment takes '
      '0 … 1, where 1 opens it: set gripper_opens = False (GRIPPER_OPENS in '
      'gin), or name by data_set (DATA_SET) the statistics of data whose '
      'gripper is 0 … 1.'
    )


def _observe(cameras, instruction, state, obs) -> openvla_oft.Observation:
  """The observations of the model, with all leading dimensions as one."""
  found = tree_paths.flatten(obs)
  images = tuple(
    found[name].reshape(-1, *found[name].shape[-3:]) for name in cameras
  )
  return openvla_oft.Observation(
    images,
    instructions.from_observation(found, instruction, len(images[0])),
    () if state is None else found[state].reshape(-1, found[state].shape[-1]),
  )
