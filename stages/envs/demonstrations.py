"""Demonstrations: collecting them, their file format, batches of them.

A file is a `.npz` of arrays whose rows are steps: `obs`, float32 [N, O], the
observation before each step, and `action`, float32 [N, A], where −1 … 1 is the
action range of the environment. For policies that decide several steps at a
time, `action` is [N, Z, A], the next Z actions. Of observations with pictures,
each part is an array of its own, such as `obs/state`, and `obs/image/table`,
uint8 [N, rows, columns, colors]. The order of rows does not matter.
"""

from collections.abc import Callable, Iterator
import functools
import pathlib
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import stages
from stages import base, ranges, source_files, tree_paths
from stages.envs import action_range, episode_stats, seed_source
from stages.envs import env as env_lib
from stages.envs.rollouts import rollout

# `obs_O -> action_A`: a scripted policy for one environment, where −1 … 1 is
# the environment's action range. It is vmapped, so it is written in JAX.
Controller = Callable[[jax.Array], jax.Array]


def scripted_policy(
  env: env_lib.Env, controller: Controller, noise_std: float
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
  env: env_lib.Env,
  controller: Controller,
  *,
  num_envs: int,
  noise_std: float,
  num_episodes: int,
  chunk: ranges.PositiveInt = 1,
  controller_env: env_lib.Env | None = None,
) -> tuple[base.Demonstration, int]:
  """Runs episodes and returns the steps of those that succeed.

  With a `controller_env`, the controller acts there, and its actions are played
  again in `env`, from the same seeds. So it may read the state of objects that
  `env` shows in pictures only.

  Args:
    env: the environment whose observations are kept.
    controller: `obs_O -> action_A`, where −1 … 1 is the action range.
    num_envs: episodes that run in parallel.
    noise_std: standard deviation of the noise added to actions.
    num_episodes: episodes to try; the first has seed 0, the next 1.
    chunk: Z, actions of a row. Beyond the end of an episode, the last action is
      repeated, as in LeRobot.
    controller_env: the same environment with vectors as observations, for the
      controller; None if those of `env` are vectors.

  Returns:
    The steps of successful episodes, and how many episodes succeeded.

  Raises:
    ValueError: if the controller's observations are not vectors.
  """
  kept, succeeded = [], 0
  for rows, kept_BT in episodes(
    env,
    controller,
    num_envs=num_envs,
    noise_std=noise_std,
    num_episodes=num_episodes,
    controller_env=controller_env,
  ):
    if chunk > 1:
      action = following(rows.action, kept_BT.sum(1), chunk)
      rows = rows._replace(action=action)
    kept.append(jax.tree.map(lambda y, kept_BT=kept_BT: y[kept_BT], rows))
    succeeded += int(kept_BT.any(1).sum())
  return jax.tree.map(lambda *ys: np.concatenate(ys), *kept), succeeded


def episodes(
  env: env_lib.Env,
  controller: Controller,
  *,
  num_envs: int,
  noise_std: float,
  num_episodes: int,
  controller_env: env_lib.Env | None = None,
) -> Iterator[tuple[base.Demonstration, np.ndarray]]:
  """Runs episodes, `num_envs` at a time.

  Arguments and errors are those of `collect`.

  Yields:
    Observations and actions [B, T, …] of as many episodes, and which of these
    steps are of an episode that succeeds [B, T]: its first ones, or none.
  """
  acting_env = controller_env or env
  _check(env, acting_env)
  policy = scripted_policy(acting_env, controller, noise_std)
  reset = rollout.reset(acting_env)
  act = rollout.rollout(policy, acting_env, acting_env.horizon)
  play = None if controller_env is None else _playback(policy, env)
  for start in range(0, num_episodes, num_envs):
    end = min(start + num_envs, num_episodes)
    seed_B = np.arange(start, end, dtype=np.int32)
    state, obs = reset(seed_B)
    keys = stages.keys(jax.random.key(start), seed_B)
    *_, x, timestep = act((), (), state, obs, keys)
    obs = x.obs
    if play is not None:
      obs, timestep = play(seed_B, x.action)
    success_B = episode_stats.first_episode(timestep).success_once
    mask_BT = episode_stats.in_first_episode(timestep) * success_B[:, None]
    rows = jax.tree.map(np.asarray, base.Demonstration(obs, x.action))
    yield rows, np.asarray(mask_BT) > 0


def _check(env: env_lib.Env, acting_env: env_lib.Env):
  spec = acting_env.obs_spec
  if isinstance(spec, dict) or len(spec.shape) != 1:
    raise ValueError(
      f'Controllers read vectors, and this environment returns {spec}: give as '
      '`controller_env` the same environment with its state as a vector.'
    )


def _playback(policy: base.Policy, env: env_lib.Env) -> Callable:
  """Returns `seed_B, action_BTA -> obs, timestep`, both [B, T]."""

  def play(seed_B, action_BTA):
    def step(carry, action_BA):
      state, obs = carry
      state, timestep = env.step(state, policy.to_env_action(action_BA))
      kept = timestep._replace(obs=(), final_obs=(), final_state=None)
      return (state, timestep.obs), (obs, kept)

    action_TBA = jnp.moveaxis(action_BTA, 1, 0)
    _, steps = jax.lax.scan(step, env.init(seed_B), action_TBA)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), steps)

  def play_on_host(seed_B, action_BTA):
    state, obs = env.init(seed_B)
    seen, steps = [], []
    for action_BA in jnp.moveaxis(action_BTA, 1, 0):
      seen.append(obs)
      action = np.asarray(policy.to_env_action(action_BA))
      state, timestep = env.step(state, action)
      obs = timestep.obs
      steps.append(timestep._replace(obs=(), final_obs=()))
    stack = lambda *xs: np.stack(xs, 1)
    return jax.tree.map(stack, *seen), jax.tree.map(stack, *steps)

  return play_on_host if env.host else jax.jit(play)


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
  arrays = {
    name: y if np.issubdtype(y.dtype, np.integer) else np.float32(y)
    for name, y in tree_paths.flatten(x._asdict()).items()
  }
  with part.open('wb') as file:
    np.savez(file, **arrays)
  part.replace(path)


def read(path: str | pathlib.Path) -> base.Demonstration:
  """Reads all steps of a file.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is no such file, lacks an array, or their lengths differ
      or are zero.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(f'There are no demonstrations at {path}.')
  try:
    with np.load(path) as file:
      names, tree = file.files, tree_paths.unflatten(dict(file))
  # A single array is no context manager, and damaged files raise the others.
  except (
    EOFError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise ValueError(
      f'{path} cannot be read as arrays of NumPy (.npz): {error}'
    ) from error
  missing = {*base.Demonstration._fields} - {*tree}
  if missing:
    raise ValueError(
      f'{path} holds {names} and lacks {sorted(missing)}: demonstrations are '
      '`obs` [N, O] and `action` [N, A].'
    )
  x = base.Demonstration(*(tree[k] for k in base.Demonstration._fields))
  lengths = {len(y) for y in jax.tree.leaves(x.obs)}
  if lengths != {len(x.action)} or lengths == {0}:
    raise ValueError(
      f'{path} holds {", ".join(map(str, sorted(lengths)))} observations and '
      f'{len(x.action)} actions: give as many of both, and at least one.'
    )
  return x


def source(
  path: str,
  *,
  batch_size: int,
  held_out: ranges.HeldOut = 100,
  held_out_batch: ranges.PositiveInt = 100,
) -> base.Source:
  """A source of random steps for training and of seeds for evaluation.

  Args:
    path: a file of demonstrations.
    batch_size: steps of a training batch, drawn with replacement.
    held_out: episodes of an evaluation.
    held_out_batch: episodes that run in parallel.
  """
  data = read(path)
  file = source_files.Files([path], np.array([source_files.digest(path)]))

  def init(seed):
    state = {'seed': np.array(seed), 'batch': np.array(0)}
    return {**state, **source_files.entries(file)}

  def next_batch(state, metrics):
    del metrics
    rng = np.random.default_rng([int(state['seed']), int(state['batch'])])
    id_B = rng.integers(len(data.action), size=batch_size)
    batch = jax.tree.map(lambda x: x[id_B], data)
    return {**state, 'batch': state['batch'] + 1}, batch

  seeds = seed_source.seeds(held_out=held_out, held_out_batch=held_out_batch)
  return base.Source(
    init, next_batch, seeds.held_out, check=source_files.checker(file)
  )
