"""OpenVLA-OFT in environments that return pictures."""

import functools

import jax.numpy as jnp
import numpy as np

from stages import base, tree_paths
from stages.models.control import action_range
from stages.models.vla import (
  action_tokens,
  openvla_env,
  openvla_oft,
  openvla_oft_policy,
)


def policy(
  env: base.Env,
  *,
  config: openvla_oft.Config,
  prompt: tuple[int, ...],
  cameras: tuple[str, ...] = ('image/table',),
  state: str | None = None,
  **settings,
) -> base.Policy:
  """A policy for an environment whose observations contain pictures.

  It decides `config.Z` actions at a time, and has an `imitation_loss`: of the
  tokens' negative log-likelihood, or of the L1 head's mean error.

  Args:
    env: the environment. The bounds of its actions are −1 and 1 of the model.
    config: the model.
    prompt: tokens of the instruction, the beginning of the text first.
    cameras: paths of the pictures in observations, the main one first.
    state: path of the robot's state, which is read as it is; None for none.
    **settings: of `openvla_oft_policy.policy`, but `logp_of`.

  Raises:
    ValueError: if the model does not fit the observations or the actions.
  """
  for camera in cameras:
    openvla_env.check_camera(env, camera)
  _check(env, config, cameras, state)
  low, high = map(np.asarray, action_range.bounds(env))
  stats = action_tokens.ActionStats(low, high, np.ones(low.shape, bool))
  own = openvla_oft_policy.policy(config, stats, **settings)
  observe = functools.partial(_observe, cameras, prompt, state)
  own = openvla_env.adapt(own, observe, cameras[0], config.Z)

  def to_env_action(action):
    # The L1 head may leave the range that the environment accepts.
    chunk = own.to_env_action(action)
    chunk = jnp.clip(
      chunk,
      action_range.broadcast(low, chunk),
      action_range.broadcast(high, chunk),
    )
    return chunk if config.Z > 1 else chunk[..., 0, :]

  return own._replace(to_env_action=to_env_action)


def _check(
  env: base.Env,
  config: openvla_oft.Config,
  cameras: tuple[str, ...],
  state: str | None,
):
  action_range.check_continuous(env)
  if len(cameras) != config.cameras:
    raise ValueError(
      f'The model reads {config.cameras} pictures, and {[*cameras]} are named: '
      'name as many cameras, the main one first.'
    )
  if len(env.action_low) != config.A:
    raise ValueError(
      f'The environment takes actions of {len(env.action_low)} numbers, and '
      f'the model writes {config.A}: set A of its config.'
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


def _observe(cameras, prompt, state, obs) -> openvla_oft.Observation:
  """The observations of the model, with all leading dimensions as one."""
  found = tree_paths.flatten(obs)
  images = tuple(
    found[name].reshape(-1, *found[name].shape[-3:]) for name in cameras
  )
  return openvla_oft.Observation(
    images,
    openvla_env.repeated(prompt, len(images[0])),
    () if state is None else found[state].reshape(-1, found[state].shape[-1]),
  )
