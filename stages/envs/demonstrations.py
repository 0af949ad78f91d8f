"""Demonstrations: collecting them, their file format, batches of them.

A file is a `.npz` of two arrays whose rows are steps: `obs`, float32 [N, O],
the observation before each step, and `action`, float32 [N, A], where −1 … 1 is
the action range of the environment. For policies that decide several steps at
a time, `action` is [N, Z, A], the next Z actions. The order of rows does not
matter.
"""

from collections.abc import Callable
import functools
import pathlib

import jax
import numpy as np

import stages
from stages import base, ranges
from stages.envs import episode_stats, seed_source
from stages.envs.rollouts import rollout
from stages.models import action_range

# `obs_O -> action_A`: a scripted policy for one environment, where −1 … 1 is
# the environment's action range. It is vmapped, so it is written in JAX.
Controller = Callable[[jax.Array], jax.Array]


def scripted_policy(
  env: base.Env, controller: Controller, noise_std: float
) -> base.Policy:
  """A policy without parameters that follows a controller, plus noise.

  Args:
    env: the environment to act in.
    controller: `obs_O -> action_A`, where −1 … 1 is the action range.
    noise_std: standard deviation of the Gaussian noise added to actions. The
      demonstrations then show how to correct deviations, and a policy cloned
      from them explores as far.
  """

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del params, group_size  # There is nothing to learn.
    action_BA = jax.vmap(controller)(obs)
    if not greedy:
      draw = lambda key: jax.random.normal(key, action_BA.shape[1:])
      action_BA += noise_std * jax.vmap(draw)(key_B)
    zero_B = 0.0 * action_BA[:, 0]
    return base.Experience(obs, action_BA, zero_B, zero_B + 1.0, zero_B)

  to_env_action = functools.partial(
    action_range.bounded, False, *action_range.bounds(env), 1
  )
  return base.Policy(lambda key: (), act, None, to_env_action)


def collect(
  env: base.Env,
  controller: Controller,
  *,
  num_envs: int,
  noise_std: float,
  num_episodes: int,
  chunk: ranges.PositiveInt = 1,
) -> tuple[base.Demonstration, int]:
  """Runs episodes and returns the steps of those that succeed.

  Args:
    env: the environment to act in; its observations are vectors.
    controller: `obs_O -> action_A`, where −1 … 1 is the action range.
    num_envs: episodes that run in parallel.
    noise_std: standard deviation of the noise added to actions.
    num_episodes: episodes to try; the first has seed 0, the next 1.
    chunk: Z, actions of a row. Beyond the end of an episode, the last action is
      repeated, as in LeRobot.

  Returns:
    The steps of successful episodes, and how many episodes succeeded.

  Raises:
    ValueError: if observations are not vectors.
  """
  if isinstance(env.obs_spec, dict) or len(env.obs_spec.shape) != 1:
    raise ValueError(
      'Demonstrations hold vector observations, and this environment has '
      f'{env.obs_spec}: configure it to return its state as a vector.'
    )
  policy = scripted_policy(env, controller, noise_std)
  reset = rollout.reset(env)
  act = rollout.rollout(policy, env, env.horizon)
  kept, succeeded = [], 0
  for start in range(0, num_episodes, num_envs):
    end = min(start + num_envs, num_episodes)
    seed_B = np.arange(start, end, dtype=np.int32)
    state, obs = reset(seed_B)
    keys = stages.keys(jax.random.key(start), seed_B)
    *_, x, timestep = act((), (), state, obs, keys)
    success_B = episode_stats.first_episode(timestep).success_once
    mask_BT = episode_stats.in_first_episode(timestep) * success_B[:, None]
    kept_BT = np.asarray(mask_BT) > 0
    action = np.asarray(x.action)
    if chunk > 1:
      action = following(action, kept_BT.sum(1), chunk)
    kept.append([np.asarray(y)[kept_BT] for y in (x.obs, action)])
    succeeded += int(success_B.sum())
  arrays = map(np.concatenate, zip(*kept, strict=True))
  return base.Demonstration(*arrays), succeeded


def following(action_BTA, length_B, chunk: int):
  """Each action with those after it, [B, T, chunk, A].

  Args:
    action_BTA: actions; those of an episode come first.
    length_B: actions of each episode, of which the last is repeated.
    chunk: actions of a chunk.
  """
  T = action_BTA.shape[1]
  at = np.arange(T)[:, None] + np.arange(chunk)
  last_B = np.maximum(length_B - 1, 0)
  at = np.minimum(at[None], last_B[:, None, None])
  return action_BTA[np.arange(len(last_B))[:, None, None], at]


def write(path: str | pathlib.Path, x: base.Demonstration):
  """Writes demonstrations to a file, atomically."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.part')
  with part.open('wb') as file:
    np.savez(file, **{k: np.float32(v) for k, v in x._asdict().items()})
  part.replace(path)


def read(path: str | pathlib.Path) -> base.Demonstration:
  """Reads all steps of a file.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it lacks an array, or their lengths differ or are zero.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(f'There are no demonstrations at {path}.')
  with np.load(path) as arrays:
    missing = {*base.Demonstration._fields} - {*arrays.files}
    if missing:
      raise ValueError(
        f'{path} holds {arrays.files} and lacks {sorted(missing)}: '
        'demonstrations are `obs` [N, O] and `action` [N, A].'
      )
    x = base.Demonstration(*(arrays[k] for k in base.Demonstration._fields))
  if not 0 < len(x.obs) == len(x.action):
    raise ValueError(
      f'{path} holds {len(x.obs)} observations and {len(x.action)} actions: '
      'give as many of both, and at least one.'
    )
  return x


def source(
  path: str, *, batch_size: int, held_out: int = 100, held_out_batch: int = 100
) -> base.Source:
  """A source of random steps for training and of seeds for evaluation.

  Args:
    path: a file of demonstrations.
    batch_size: steps of a training batch, drawn with replacement.
    held_out: episodes of an evaluation.
    held_out_batch: episodes that run in parallel.
  """
  data = read(path)

  def init(seed):
    return {'seed': np.array(seed), 'batch': np.array(0)}

  def next_batch(state, metrics):
    del metrics
    rng = np.random.default_rng([int(state['seed']), int(state['batch'])])
    id_B = rng.integers(len(data.obs), size=batch_size)
    batch = base.Demonstration(data.obs[id_B], data.action[id_B])
    return {**state, 'batch': state['batch'] + 1}, batch

  seeds = seed_source.seeds(held_out=held_out, held_out_batch=held_out_batch)
  return base.Source(init, next_batch, seeds.held_out)
