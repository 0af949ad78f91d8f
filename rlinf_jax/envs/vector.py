"""A vector environment as an `Env`: one object that steps all rows at once.

For simulators on a GPU, and any `gymnasium.vector.VectorEnv`:

env = vector.env('my_module:my/Env-v0', num_envs=16)
env = vector.wrap(vector_env, horizon=100)  # An object of yours.

It lives in the process that steps it. Its batch is never cut into pieces, an
exception ends the step of all rows, and running episodes are not saved: a run
that is resumed starts new ones, and reports it.
"""

from collections.abc import Callable, Mapping
import importlib
from typing import Any

import jax
import numpy as np

from rlinf_jax.envs import env_pool, gymnasium, simulator
from rlinf_jax.system import notices
from stages.envs import env as env_lib

FINAL = 'final_obs', 'final_observation'  # Its names in infos.
SUCCESS = 'success', 'is_success'


def env(name: str, num_envs: int, **settings) -> env_lib.Env:
  """An Env of `num_envs` environments that `gymnasium.make_vec` makes.

  Args:
    name: an id of Gymnasium's registry; 'module:id' imports the module first.
    num_envs: how many environments.
    **settings: further arguments of `gymnasium.make_vec`.
  """
  try:
    import gymnasium as gym
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{name!r} needs Gymnasium ({error}): pip install "rlinf-jax[gymnasium]".'
    ) from None
  module, _, name = name.rpartition(':')
  if module:
    importlib.import_module(module)
  if gym.spec(name).vector_entry_point is None:
    disabled = {'autoreset_mode': gym.vector.AutoresetMode.DISABLED}
    settings = {'vector_kwargs': disabled} | settings
  return wrap(gym.make_vec(name, num_envs=num_envs, **settings))


def wrap(
  env: Any,
  horizon: int | None = None,
  say: Callable[[str], None] = notices.notify,
) -> env_lib.Env:
  """Wraps a vector environment as an Env.

  Args:
    env: a `gymnasium.vector.VectorEnv`, of arrays or of torch's tensors.
    horizon: maximum steps of an episode; None for that of its `spec`.
    say: told of episodes that are started anew.

  Raises:
    ValueError: if its autoreset mode or horizon is missing or unsupported.
  """
  vector = Vector(env, horizon, say)
  return env_pool.host_env(
    vector.spec,
    vector.init,
    vector.step,
    lockstep=True,
    snapshot_spec=(),
    save=lambda token: (),
    load=vector.load,
  )


class Vector:
  """A vector environment behind a token.

  Attributes:
    spec: of one of its environments.
  """

  def __init__(self, env, horizon: int | None, say: Callable[[str], None]):
    """Reads the spaces."""
    mode = getattr(env, 'metadata', {}).get('autoreset_mode')
    self._same_step = getattr(mode, 'value', mode) == 'SameStep'
    if not self._same_step and getattr(mode, 'value', mode) != 'Disabled':
      raise ValueError(
        'The autoreset mode of the vector environment is '
        f'{getattr(mode, "value", mode)!r}: make it with '
        'AutoresetMode.SAME_STEP or DISABLED, as one step must return both the '
        'final observation of an episode and the first of the next.'
      )
    if horizon is None:
      spec = getattr(env, 'spec', None)
      horizon = spec and spec.max_episode_steps
    if not horizon:
      raise ValueError(
        'Episodes of the vector environment have no limit of steps: give '
        '`horizon`.'
      )
    self._env, self._say, self._n = env, say, env.num_envs
    self._actions = gymnasium.Actions(env.single_action_space)
    self._space = env.single_observation_space
    self.spec = simulator.Spec(
      obs=gymnasium.obs_arrays(self._space),
      low=self._actions.low,
      high=self._actions.high,
      horizon=horizon,
      choices=self._actions.choices,
    )
    self._token = None  # Of all rows, before the next step.

  def init(self, seed_B):
    """Starts episodes by seeds; other rows run by other seeds, unused.

    Returns:
      A token, int32 [B, 3], and observations, a tree of [B, ...].
    """
    seed_B = np.asarray(seed_B, np.int32)
    if len(seed_B) > self._n:
      raise ValueError(
        f'{len(seed_B)} seeds for {self._n} environments: make as many as the '
        'batch has.'
      )
    seed_N = np.concatenate([seed_B, np.arange(self._n - len(seed_B))])
    return self._start(seed_N, np.zeros(self._n, np.int32), len(seed_B))

  def load(self, token, snapshot):
    """Starts new episodes if the token is another process's, or an old one.

    Returns:
      The token.
    """
    del snapshot
    token = np.asarray(token)
    B = len(token)
    if not self._is_current(token):
      if not np.array_equal(token[:, 0], np.arange(B)) or B > self._n:
        raise ValueError(
          f'A token must name the first of {self._n} environments, in order.'
        )
      call_N, seed_N = np.zeros(self._n, np.int32), np.arange(self._n)
      call_N[:B], seed_N[:B] = token[:, 1], token[:, 2]
      self._start(seed_N, call_N, B)
      self._say(
        f'Episodes started anew, as a vector environment is not saved: {B}.'
      )
    return token

  def step(self, token, action):
    """Steps all environments at once.

    Args:
      token: int32 [B, 3], as `init` or the last call returned it.
      action: [B, A].

    Returns:
      The next token, and the `stages.TimeStep`.
    """
    token, action = np.asarray(token), np.asarray(action, np.float32)
    if not self._is_current(token):
      raise ValueError(
        'The token is not the last that the vector environment returned: all '
        'of its rows are stepped at once, and each token is used once.'
      )
    B = len(token)
    idle = np.zeros((self._n - B, action.shape[1]), np.float32)
    obs, reward, terminated, truncated, info = self._env.step(
      self._actions.batch(np.concatenate([action, idle]))
    )
    terminated, truncated = (_numpy(x) > 0 for x in (terminated, truncated))
    done = terminated | truncated
    success = self._success(info)
    obs = final_obs = self._read(obs)
    if self._same_step and done.any():
      # The infos of rows that are done are the next episode's.
      success = (success & ~done) | self._success(info.get('final_info', {}))
      final_obs = self._final_obs(info, done, obs)
    reward = _numpy(reward).astype(np.float32)
    if (failed := self._failed(final_obs, obs, reward)).any():
      final_obs = jax.tree.map(
        lambda x, y: _where(failed, x, y), self._obs, final_obs
      )
      reward, done = np.where(failed, 0, reward), done | failed
      terminated, success = terminated & ~failed, success & ~failed
    self._token = self._token + np.array([0, 1, 0], np.int32)
    if done.any() and not self._same_step:
      obs = self._reset(options={'reset_mask': done})
    self._obs = obs
    first_B = lambda x: jax.tree.map(lambda leaf: leaf[:B].copy(), x)
    number = lambda x: x[:B].astype(np.float32)
    return self._token[:B].copy(), env_lib.TimeStep(
      obs=first_B(obs),
      reward=number(reward),
      terminated=number(terminated),
      truncated=number((truncated | failed) & ~terminated),
      final_obs=first_B(final_obs),
      success=number(success),
      steps=np.ones(B, np.float32),
      env_failed=number(failed),
      action_reward=number(reward)[:, None],
      chunk_success=number(success),
    )

  def _start(self, seed_N, call_N, B: int):
    """Starts episodes in all rows; returns token and observations of `B`."""
    row_N = np.arange(self._n)
    self._token = np.stack([row_N, call_N, seed_N], 1).astype(np.int32)
    self._obs = self._reset()
    obs = jax.tree.map(lambda x: x[:B].copy(), self._obs)
    return self._token[:B].copy(), obs

  def _reset(self, **options):
    """Starts the episodes before the calls of the token."""
    seeds = [
      simulator.episode_seed(int(seed), int(call))
      for _, call, seed in self._token
    ]
    obs = self._read(self._env.reset(seed=seeds, **options)[0])
    if not (finite_N := _finite(obs)).all():
      i = int(finite_N.argmin())
      raise RuntimeError(
        f'Environment {i} returned an observation that is not finite when its '
        f'episode of seed {seeds[i]} began.'
      )
    return obs

  def _success(self, info: Mapping) -> np.ndarray:
    """Success of each row by its info; zero if infos have none."""
    found = [info[name] for name in SUCCESS if name in info]
    return _numpy(found[0]) > 0 if found else np.zeros(self._n, bool)

  def _final_obs(self, info: Mapping, done, obs):
    """Final observations of rows that are done; `obs` of the others."""
    found = [info[name] for name in FINAL if name in info]
    if not found:
      raise RuntimeError(
        f'Episodes have ended, and infos have none of {FINAL}: a vector '
        'environment with SAME_STEP must return final observations there.'
      )
    (final, *_) = found
    if getattr(final, 'dtype', None) is not np.dtype(object):  # A batch.
      final = self._read(final)
      return jax.tree.map(lambda x, y: _where(done, x, y), final, obs)
    merged = jax.tree.map(np.copy, obs)
    for i in np.flatnonzero(done):
      leaves = simulator.leaves(gymnasium.read(final[i], self._space))
      for path, x in simulator.leaves(merged).items():
        x[i] = leaves[path]
    return merged

  def _failed(self, final_obs, obs, reward) -> np.ndarray:
    """Rows whose observations or rewards are not finite."""
    failed = ~(np.isfinite(reward) & _finite(final_obs) & _finite(obs))
    if self._same_step and failed.any():
      i = int(failed.argmax())
      raise RuntimeError(
        f'Environment {i} returned what is not finite at call '
        f'{self._token[i, 1]}, and a vector environment that resets by itself '
        'cannot be told to: use AutoresetMode.DISABLED.'
      )
    return failed

  def _is_current(self, token) -> bool:
    return self._token is not None and np.array_equal(
      token, self._token[: len(token)]
    )

  def _read(self, obs):
    """Observations of all rows, [N, ...], in the shapes of the spec, copied."""
    return gymnasium.read(obs, self._space, (self._n,), _numpy)


def _numpy(x) -> np.ndarray:
  """A copy of an array, or of a torch tensor on any device."""
  return np.array(x.cpu() if hasattr(x, 'cpu') else x)


def _where(row_N, x, y):
  return np.where(row_N.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _finite(obs) -> np.ndarray:
  """Rows whose observations are finite, bool [N]."""
  leaves = simulator.leaves(obs).values()
  finite = [np.isfinite(x.reshape(len(x), -1)).all(1) for x in leaves]
  return np.logical_and.reduce(finite)
