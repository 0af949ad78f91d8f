"""Any environment of Gymnasium as a Env.

world = gymnasium.env('Pendulum-v1', n=16, processes=2)
world = gymnasium.env('my_module:my/Env-v0', n=16)  # Yours, if registered.

With `render_mode='rgb_array'` there are videos of evaluations.
"""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from rlinf_jax.envs import simulator

EDGE = 200  # Pixels of a picture for people, at most.


def env(name: str, num_envs: int, num_processes: int = 1, **settings):
  """An Env of `num_envs` environments, in processes of their own.

  Args:
    name: an id of Gymnasium's registry; 'module:id' imports the module first.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.pool.Pool` by their names there, all
      others for `gymnasium.make`.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  return env_pool.env(make, num_envs, num_processes, name=name, **settings)


def make(index: int, name: str, **settings) -> simulator.Environment:
  """One environment; of a registered id all are alike, whatever the index."""
  del index
  try:
    import gymnasium
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{name!r} needs Gymnasium ({error}): pip install "rlinf-jax[gymnasium]".'
    ) from None
  return Gymnasium(gymnasium.make(name, **settings))


class Gymnasium:
  """An environment of Gymnasium, as a worker steps it.

  Numbers become float32, or stay uint8 where they are pictures. A choice among
  n is made by the greatest of n numbers in [0, 1].
  """

  def __init__(self, env: Any):
    """Reads the spaces."""
    self._env, self._actions = env, Actions(env.action_space)
    self.spec = simulator.Spec(
      like(env.observation_space),
      *(self._actions.low, self._actions.high),
      _horizon(env),
      self._picture(),
    )

  def reset(self, seed: int) -> simulator.Tree:
    return read(self._env.reset(seed=seed)[0], self.spec.obs)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, terminated, truncated, info = self._env.step(
      self._actions.one(action_A)
    )
    success = info.get('success', info.get('is_success', False))
    return simulator.Step(
      *(read(obs, self.spec.obs), float(reward)),
      *(bool(terminated), bool(truncated), bool(success)),
    )

  def draw(self) -> np.ndarray:
    return _small(self._env.render())

  def _picture(self) -> simulator.Array | None:
    if self._env.render_mode != 'rgb_array':
      return None
    self._env.reset(seed=0)
    try:
      shape = self.draw().shape
    except Exception:  # noqa: BLE001 Told when there is somebody to see it.
      shape = 1, 1, 3
    return simulator.Array(shape, 'uint8')

  def close(self):
    self._env.close()


class Actions:
  """What a space of Gymnasium makes of numbers.

  Attributes:
    low: the least of each, [A].
    high: the most.
  """

  def __init__(self, space: Any):
    """Reads the space."""
    self._space, self._chooses = space, hasattr(space, 'n')
    if self._chooses:
      low, high = np.zeros(space.n), np.ones(space.n)
    elif getattr(space, 'low', None) is not None:
      low, high = space.low.ravel(), space.high.ravel()
    else:
      raise ValueError(f'Actions are {space}: only Box and Discrete are known.')
    self.low, self.high = low.astype(np.float32), high.astype(np.float32)

  def one(self, action_A: np.ndarray):
    """An action of one environment."""
    made = self.batch(action_A[None])[0]
    return int(made) if self._chooses else made

  def batch(self, action_BA: np.ndarray) -> np.ndarray:
    """Actions of several."""
    space = self._space
    if self._chooses:
      return space.start + action_BA.argmax(1)
    action_BA = np.clip(action_BA, self.low, self.high)
    return action_BA.reshape(-1, *space.shape).astype(space.dtype)


def _small(frame: np.ndarray) -> np.ndarray:
  """A picture of means of squares of pixels, so that it is small enough."""
  high, wide, colors = frame.shape
  s = -(-max(high, wide) // EDGE)
  cut = frame[: high // s * s, : wide // s * s]
  return (
    cut.reshape(high // s, s, wide // s, s, colors)
    .mean((1, 3))
    .astype(np.uint8)
  )


def like(space) -> simulator.Tree:
  """What a space shows, as shapes."""
  if hasattr(space, 'spaces') and isinstance(space.spaces, Mapping):
    return {name: like(child) for name, child in space.spaces.items()}
  if space.shape is None:
    raise ValueError(f'Observations are {space}: only arrays are known.')
  if len(space.shape) == 3 and space.dtype == np.uint8:
    return simulator.Array(space.shape, 'uint8')
  return simulator.Array((math.prod(space.shape),), 'float32')


def _horizon(env) -> int:
  """Most steps of an episode."""
  limit = env.spec.max_episode_steps if env.spec else None
  if limit is None:
    raise ValueError(
      'Its episodes have no limit of steps: give it `max_episode_steps`.'
    )
  return limit


def read(obs, want, rows=(), array=np.asarray) -> simulator.Tree:
  """An observation as arrays of the shapes that were promised.

  Args:
    obs: of one environment, or of many.
    want: a tree of `environment.Array`, of one.
    rows: what comes before that shape.
    array: makes an array of what is in `obs`.
  """
  if isinstance(want, Mapping):
    return {
      name: read(obs[name], child, rows, array) for name, child in want.items()
    }
  return array(obs).astype(want.dtype, copy=False).reshape(*rows, *want.shape)
