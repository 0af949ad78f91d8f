"""A vector environment as a World: one object that steps all rows at once.

So simulators on a GPU come, and whatever is a `gymnasium.vector.VectorEnv`:

world = vector.world('my_module:my/Env-v0', n=16)
world = vector.of(env, horizon=100)  # Yours, as it is.

It lives in the process that steps it. Its batch is not cut in pieces, a failure
in it is one of all its rows, and what it was in the middle of is not saved: a
run that is resumed begins new episodes, and says so.
"""

from collections.abc import Callable, Mapping
import importlib
from typing import Any

import jax
import numpy as np

from rlinf_jax import told
from rlinf_jax.worlds import environment, gymnasium
from stages import base

FINAL = 'final_obs', 'final_observation'  # As infos call it.
SUCCESS = 'success', 'is_success'


def world(name: str, n: int, **settings) -> base.World:
  """A World of `n` environments that Gymnasium makes as one.

  Args:
    name: an id of Gymnasium's registry; 'module:id' imports the module first.
    n: how many environments.
    **settings: others of `gymnasium.make_vec`.
  """
  try:
    import gymnasium as gym
  except ImportError as error:
    raise environment.UnavailableError(
      f'{name!r} needs Gymnasium ({error}): pip install "rlinf-jax[gymnasium]".'
    ) from None
  module, _, name = name.rpartition(':')
  if module:
    importlib.import_module(module)
  if gym.spec(name).vector_entry_point is None:
    disabled = {'autoreset_mode': gym.vector.AutoresetMode.DISABLED}
    settings = {'vector_kwargs': disabled} | settings
  return of(gym.make_vec(name, num_envs=n, **settings))


def of(
  env: Any, horizon: int | None = None, say: Callable[[str], None] = told.say
) -> base.World:
  """A vector environment as a World.

  Args:
    env: a `gymnasium.vector.VectorEnv`, of arrays or of torch's tensors.
    horizon: most steps of an episode; None for what its `spec` says.
    say: told of episodes that begin anew.

  Raises:
    ValueError: if it cannot be one, with what to do.
  """
  made = Vector(env, horizon, say)
  obs = jax.tree.map(
    lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype),
    made.spec.obs,
    is_leaf=lambda x: isinstance(x, environment.Array),
  )
  low, high = (tuple(x.tolist()) for x in (made.spec.low, made.spec.high))
  return base.World(
    *(made.init, made.step, obs, low, high, made.spec.horizon),
    host=True,
    whole=True,
    past=(),
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
    self.spec = environment.Spec(
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
    rest = np.arange(self._n - len(seed_B))
    self._seed = np.concatenate([seed_B, rest]).astype(np.int32)
    return self._begin(np.zeros(self._n, np.int32), len(seed_B))

  def load(self, token, past):
    """Begins new episodes where a token is of another process, or an old one.

    Returns:
      The token.
    """
    del past
    token = np.asarray(token)
    if not self._at(token):
      call_N = np.zeros(self._n, np.int32)
      self._seed = np.arange(self._n, dtype=np.int32)
      row_B, call_N[: len(token)], self._seed[: len(token)] = token.T
      if (row_B != np.arange(len(token))).any():
        raise ValueError(
          'A token names the first of its environments in order.'
        )
      self._begin(call_N, len(token))
      self._say(
        f'New episodes, as a vector environment cannot be saved: {len(token)}.'
      )
    return token

  def step(self, token, action):
    """Acts in all environments at once.

    Args:
      token: int32 [B, 3], as `init` or the call before returned it.
      action: [B, A].

    Returns:
      The next token, and the `stages.base.Outcome`.
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
    success = _flag(info, SUCCESS, self._n)
    if self._itself and ended.any():
      success |= ended & _flag(info.get('final_info', {}), SUCCESS, self._n)
      now = self._read(obs)
      last = self._final(next(info[x] for x in FINAL if x in info), ended, now)
    else:
      now = last = self._read(obs)
    reward = _numpy(reward).astype(np.float32)
    if (lost := self._lost(last, now, reward)).any():
      last = jax.tree.map(lambda x, y: _where(lost, x, y), self._seen, last)
      reward, ended = np.where(lost, 0, reward), ended | lost
      terminated, success = terminated & ~lost, success & ~lost
    self._token = self._token + np.array([0, 1, 0], np.int32)
    if ended.any() and not self._itself:
      now = self._anew(ended)
    self._seen = now
    part = lambda x: jax.tree.map(lambda leaf: leaf[:B].copy(), x)
    number = lambda x: x[:B].astype(np.float32)
    return self._token[:B].copy(), base.Outcome(
      obs=part(now),
      reward=number(reward),
      terminated=number(terminated),
      truncated=number((truncated | lost) & ~terminated),
      final_obs=part(last),
      success=number(success),
      steps=np.ones(B, np.float32),
      lost=number(lost),
    )

  def _begin(self, call_N, B: int):
    """Begins episodes in all rows; returns the token and sight of the first."""
    seeds = [
      environment.episode_seed(int(seed), int(call))
      for seed, call in zip(self._seed, call_N, strict=True)
    ]
    self._seen = self._read(self._env.reset(seed=seeds)[0])
    row_N = np.arange(self._n, dtype=np.int32)
    self._token = np.stack([row_N, call_N, self._seed], 1)
    seen = jax.tree.map(lambda x: x[:B].copy(), self._seen)
    return self._token[:B].copy(), seen

  def _anew(self, ended):
    """Begins episodes where some have ended."""
    seeds = [
      environment.episode_seed(int(seed), int(call))
      for _, call, seed in self._token
    ]
    obs, _ = self._env.reset(seed=seeds, options={'reset_mask': ended})
    return self._read(obs)

  def _final(self, final, ended, now):
    """What episodes that have ended showed last, and what the others show."""
    if getattr(final, 'dtype', None) is not np.dtype(object):  # A batch.
      final = self._read(final)
      return jax.tree.map(lambda x, y: _where(ended, x, y), final, now)
    last = jax.tree.map(np.copy, now)
    for i in np.flatnonzero(ended):
      one = environment.leaves(gymnasium.read(final[i], self.spec.obs))
      for path, x in environment.leaves(last).items():
        x[i] = one[path]
    return last

  def _lost(self, last, now, reward) -> np.ndarray:
    """Rows that showed nothing which could be learned from."""
    lost = ~(_finite(last, reward) & _finite(now, reward))
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


def _flag(info: Mapping, names, n: int) -> np.ndarray:
  """What infos say of each row, if they do."""
  said = [info[name] for name in names if name in info]
  return _numpy(said[0]).astype(bool) if said else np.zeros(n, bool)


def _where(row_N, x, y):
  return np.where(row_N.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _finite(obs, reward) -> np.ndarray:
  """Whether all is that a row shows."""
  fine = np.isfinite(reward)
  for x in environment.leaves(obs).values():
    if x.dtype.kind == 'f':
      fine &= np.isfinite(x.reshape(len(x), -1)).all(1)
  return fine
