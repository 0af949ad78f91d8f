"""A vector environment as a Env: one object that steps all rows at once.

So simulators on a GPU come, and whatever is a `gymnasium.vector.VectorEnv`:

world = vector.env('my_module:my/Env-v0', n=16)
world = vector.wrap(env, horizon=100)  # Yours, as it is.

It lives in the process that steps it. Its batch is not cut in pieces, what it
raises ends the step for all rows, and what it was in the middle of is not
saved: a run that is resumed begins new episodes, and says so.
"""

from collections.abc import Callable, Mapping
import importlib
from typing import Any

import jax
import numpy as np

from rlinf_jax.envs import env_pool, gymnasium, simulator
from rlinf_jax.run import notices
from stages import base

FINAL = 'final_obs', 'final_observation'  # As infos call it.
SUCCESS = 'success', 'is_success'


def env(name: str, num_envs: int, **settings) -> base.Env:
  """An Env of `num_envs` environments that Gymnasium makes as one.

  Args:
    name: an id of Gymnasium's registry; 'module:id' imports the module first.
    num_envs: how many environments.
    **settings: others of `gymnasium.make_vec`.
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
) -> base.Env:
  """A vector environment as a Env.

  Args:
    env: a `gymnasium.vector.VectorEnv`, of arrays or of torch's tensors.
    horizon: most steps of an episode; None for what its `spec` says.
    say: told of episodes that begin anew.

  Raises:
    ValueError: if it cannot be one, with what to do.
  """
  made = Vector(env, horizon, say)
  return env_pool.host_env(
    *(made.spec, made.init, made.step),
    lockstep=True,
    snapshot_spec=(),
    save=lambda token: (),
    load=made.load,
  )


class Vector:
  """A vector environment, behind a token.

  Attributes:
    spec: what it shows and takes.
  """

  def __init__(self, env, horizon: int | None, say: Callable[[str], None]):
    """Reads the spaces."""
    mode = getattr(env, 'metadata', {}).get('autoreset_mode')
    self._itself = getattr(mode, 'value', mode) == 'SameStep'
    if not self._itself and getattr(mode, 'value', mode) != 'Disabled':
      raise ValueError(
        'The vector environment begins episodes anew by mode '
        f'{getattr(mode, "value", mode)!r}: make it with '
        'AutoresetMode.SAME_STEP or DISABLED, as the last that an episode '
        'shows and the first of the next are wanted of one step.'
      )
    if horizon is None:
      spec = getattr(env, 'spec', None)
      horizon = spec and spec.max_episode_steps
    if not horizon:
      raise ValueError(
        'Episodes of the vector environment have no limit of steps: say '
        '`horizon`.'
      )
    self._env, self._say, self._n = env, say, env.num_envs
    self._actions = gymnasium.Actions(env.single_action_space)
    self.spec = simulator.Spec(
      gymnasium.like(env.single_observation_space),
      *(self._actions.low, self._actions.high, horizon),
    )
    self._token = None  # Of all rows, as the next step expects it.

  def init(self, seed_B):
    """Begins episodes by seeds; rows beyond them begin by others, unseen.

    Returns:
      A token, int32 [B, 3], and what is seen, a tree of [B, ...].
    """
    seed_B = np.asarray(seed_B, np.int32)
    if len(seed_B) > self._n:
      raise ValueError(
        f'{len(seed_B)} seeds for {self._n} environments: make as many as the '
        'batch has.'
      )
    seed_N = np.concatenate([seed_B, np.arange(self._n - len(seed_B))])
    return self._begin(seed_N, np.zeros(self._n, np.int32), len(seed_B))

  def load(self, token, past):
    """Begins new episodes where a token is of another process, or an old one.

    Returns:
      The token.
    """
    del past
    token = np.asarray(token)
    B = len(token)
    if not self._at(token):
      if not np.array_equal(token[:, 0], np.arange(B)) or B > self._n:
        raise ValueError(
          f'A token must name the first of {self._n} environments, in order.'
        )
      call_N, seed_N = np.zeros(self._n, np.int32), np.arange(self._n)
      call_N[:B], seed_N[:B] = token[:, 1], token[:, 2]
      self._begin(seed_N, call_N, B)
      self._say(f'New episodes, as a vector environment cannot be saved: {B}.')
    return token

  def step(self, token, action):
    """Acts in all environments at once.

    Args:
      token: int32 [B, 3], as `init` or the call before returned it.
      action: [B, A].

    Returns:
      The next token, and the `stages.base.TimeStep`.
    """
    token, action = np.asarray(token), np.asarray(action, np.float32)
    if not self._at(token):
      raise ValueError(
        'The token is not of what the vector environment showed last: all of '
        'its rows are stepped at once, and each token is used once.'
      )
    B = len(token)
    idle = np.zeros((self._n - B, action.shape[1]), np.float32)
    obs, reward, terminated, truncated, info = self._env.step(
      self._actions.batch(np.concatenate([action, idle]))
    )
    terminated, truncated = (_numpy(x) > 0 for x in (terminated, truncated))
    ended = terminated | truncated
    success = self._success(info)
    now = last = self._read(obs)
    if self._itself and ended.any():
      # Of rows that have ended `info` is the next episode's.
      success = (success & ~ended) | self._success(info.get('final_info', {}))
      last = self._final(info, ended, now)
    reward = _numpy(reward).astype(np.float32)
    if (lost := self._lost(last, now, reward)).any():
      last = jax.tree.map(lambda x, y: _where(lost, x, y), self._seen, last)
      reward, ended = np.where(lost, 0, reward), ended | lost
      terminated, success = terminated & ~lost, success & ~lost
    self._token = self._token + np.array([0, 1, 0], np.int32)
    if ended.any() and not self._itself:
      now = self._reset(options={'reset_mask': ended})
    self._seen = now
    part = lambda x: jax.tree.map(lambda leaf: leaf[:B].copy(), x)
    number = lambda x: x[:B].astype(np.float32)
    return self._token[:B].copy(), base.TimeStep(
      obs=part(now),
      reward=number(reward),
      terminated=number(terminated),
      truncated=number((truncated | lost) & ~terminated),
      final_obs=part(last),
      success=number(success),
      steps=np.ones(B, np.float32),
      env_failed=number(lost),
    )

  def _begin(self, seed_N, call_N, B: int):
    """Begins episodes in all rows; returns the token and sight of the first."""
    row_N = np.arange(self._n)
    self._token = np.stack([row_N, call_N, seed_N], 1).astype(np.int32)
    self._seen = self._reset()
    seen = jax.tree.map(lambda x: x[:B].copy(), self._seen)
    return self._token[:B].copy(), seen

  def _reset(self, **options):
    """Begins the episodes that come before the calls of the token."""
    seeds = [
      simulator.episode_seed(int(seed), int(call))
      for _, call, seed in self._token
    ]
    seen = self._read(self._env.reset(seed=seeds, **options)[0])
    if not (fine_N := _finite(seen)).all():
      i = int(fine_N.argmin())
      raise RuntimeError(
        f'Environment {i} showed what is not finite as its episode of seed '
        f'{seeds[i]} began.'
      )
    return seen

  def _success(self, info: Mapping) -> np.ndarray:
    """What infos say of each row, if they do."""
    said = [info[name] for name in SUCCESS if name in info]
    return _numpy(said[0]) > 0 if said else np.zeros(self._n, bool)

  def _final(self, info: Mapping, ended, now):
    """What episodes that have ended showed last, and what the others show."""
    said = [info[name] for name in FINAL if name in info]
    if not said:
      raise RuntimeError(
        f'Episodes have ended, and infos have none of {FINAL}: what they '
        'showed last is wanted of a vector environment by SAME_STEP.'
      )
    (final, *_) = said
    if getattr(final, 'dtype', None) is not np.dtype(object):  # A batch.
      final = self._read(final)
      return jax.tree.map(lambda x, y: _where(ended, x, y), final, now)
    last = jax.tree.map(np.copy, now)
    for i in np.flatnonzero(ended):
      one = simulator.leaves(gymnasium.read(final[i], self.spec.obs))
      for path, x in simulator.leaves(last).items():
        x[i] = one[path]
    return last

  def _lost(self, last, now, reward) -> np.ndarray:
    """Rows that showed nothing which could be learned from."""
    lost = ~(np.isfinite(reward) & _finite(last) & _finite(now))
    if self._itself and lost.any():
      i = int(lost.argmax())
      raise RuntimeError(
        f'Environment {i} showed what is not finite at call '
        f'{self._token[i, 1]}, and a vector environment that begins anew by '
        'itself cannot be told to: use AutoresetMode.DISABLED.'
      )
    return lost

  def _at(self, token) -> bool:
    return self._token is not None and np.array_equal(
      token, self._token[: len(token)]
    )

  def _read(self, obs):
    """Arrays [N, ...] of the shapes that were promised, its own memory."""
    return gymnasium.read(obs, self.spec.obs, (self._n,), _numpy)


def _numpy(x) -> np.ndarray:
  """An array, or a tensor of torch wherever it is, as an array of its own."""
  return np.array(x.cpu() if hasattr(x, 'cpu') else x)


def _where(row_N, x, y):
  return np.where(row_N.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _finite(obs) -> np.ndarray:
  """Whether all is that a row shows."""
  leaves = simulator.leaves(obs).values()
  fine = [np.isfinite(x.reshape(len(x), -1)).all(1) for x in leaves]
  return np.logical_and.reduce(fine)
