"""Demonstrations: who makes them, the file they are in, batches of them.

A file is a `.npz` of two arrays whose rows are steps: `obs`, float32 [N, O],
what was seen before each, and `action`, float32 [N, A], what was done, where
−1 … 1 is the range that the world has. The order of steps does not matter.
"""

from collections.abc import Callable
import pathlib

import jax
import numpy as np

import stages
from stages import base
from stages.envs import episode_stats, rollout, seed_source
from stages.models import gaussian_policy


def scripted_policy(
  world: base.Env, controller: Callable, noise_std: float
) -> base.Policy:
  """A policy that does what somebody wrote down, and deviates from it.

  Args:
    world: where.
    controller: `obs_O -> action_A`, where −1 … 1 is the range of the world.
    noise_std: of the Gaussian noise that is added. What makes up for it is
      demonstrated, too, and whoever clones that explores as far.
  """

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del params, group_size  # There is nothing to learn.
    action_BA = jax.vmap(controller)(obs)
    if not greedy:
      draw = lambda key: jax.random.normal(key, action_BA.shape[1:])
      action_BA += noise_std * jax.vmap(draw)(key_B)
    none_B = 0.0 * action_BA[:, 0]
    return base.Experience(obs, action_BA, none_B, none_B + 1.0, none_B)

  return base.Policy(
    lambda key: (), act, None, gaussian_policy.policy(world).to_env_action
  )


def collect(
  world: base.Env,
  controller: Callable,
  *,
  num_envs: int,
  noise_std: float,
  num_episodes: int,
) -> tuple[base.Demonstration, int]:
  """The episodes that succeed of some, step by step; and how many those are.

  Args:
    world: where.
    controller: `obs_O -> action_A`, where −1 … 1 is the range of the world.
    num_envs: environments.
    noise_std: of actions from what it says.
    num_episodes: how many; the first has seed 0, the next 1.
  """
  if isinstance(world.obs_spec, dict) or len(world.obs_spec.shape) != 1:
    raise ValueError(
      'Demonstrations hold vector observations, and this environment has '
      f'{world.obs_spec}: configure it to return its state as a vector.'
    )
  policy = scripted_policy(world, controller, noise_std)
  reset = rollout.reset(world)
  act = rollout.rollout(policy, world, world.horizon)
  kept, succeeded = [], 0
  for begin in range(0, num_episodes, num_envs):
    seed_B = np.arange(
      begin, min(begin + num_envs, num_episodes), dtype=np.int32
    )
    state, obs = reset(seed_B)
    keys = stages.keys(jax.random.key(begin), seed_B)
    *_, x, timestep = act((), (), state, obs, keys)
    success_B = episode_stats.first_episode(timestep).success_once
    counts_BT = (
      np.asarray(episode_stats.in_first_episode(timestep) * success_B[:, None])
      > 0
    )
    kept.append([np.asarray(y)[counts_BT] for y in (x.obs, x.action)])
    succeeded += int(success_B.sum())
  every = map(np.concatenate, zip(*kept, strict=True))
  return base.Demonstration(*every), succeeded


def write(path: str | pathlib.Path, x: base.Demonstration):
  """Writes a file that is there whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.part')
  with part.open('wb') as file:
    np.savez(file, **{k: np.float32(v) for k, v in x._asdict().items()})
  part.replace(path)


def read(path: str | pathlib.Path) -> base.Demonstration:
  """All steps of a file."""
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
  """Steps at random, and held-out seeds to try what was learned from them.

  Args:
    path: of a file of demonstrations.
    batch_size: steps of a batch.
    held_out: episodes of an evaluation.
    held_out_batch: how many of them go on at once.
  """
  every = read(path)

  def init(seed):
    return {'seed': np.array(seed), 'batch': np.array(0)}

  def draw(state, metrics):
    del metrics
    rng = np.random.default_rng([int(state['seed']), int(state['batch'])])
    id_B = rng.integers(len(every.obs), size=batch_size)
    batch = base.Demonstration(every.obs[id_B], every.action[id_B])
    return {**state, 'batch': state['batch'] + 1}, batch

  tried = seed_source.seeds(held_out=held_out, held_out_batch=held_out_batch)
  return base.Source(init, draw, tried.held_out)
