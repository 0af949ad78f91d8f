"""Environments of Gymnasium as an `Env`.

env = gymnasium.env('Pendulum-v1', num_envs=16, num_processes=2)
env = gymnasium.env('my_module:my/Env-v0', num_envs=16)  # Yours, if registered.

With `render_mode='rgb_array'` there are videos of evaluations.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from rlinf_jax.envs import settings as settings_lib
from rlinf_jax.envs import simulator

MAX_SIZE = 200  # Pixels along an edge of a frame for people.


@settings_lib.passes_settings_to(lambda: make)
def env(
  name: str,
  num_envs: simulator.PositiveInt,
  num_processes: simulator.PositiveInt = 1,
  **settings,
):
  """An Env of `num_envs` environments, in processes of their own.

  Args:
    name: an id of Gymnasium's registry; 'module:id' imports the module first.
    num_envs: how many environments.
    num_processes: to spread them over.
    **settings: those of `rlinf_jax.envs.processes.pool.EnvPool` by
      their names there, all others for `gymnasium.make`.
  """
  from rlinf_jax.envs import env_pool  # Not in a worker: it imports JAX.

  return env_pool.env(make, num_envs, num_processes, name=name, **settings)


def make(index: int, name: str, **settings) -> simulator.Environment:
  """Builds one environment; they do not depend on the index."""
  del index
  try:
    import gymnasium
  except ImportError as error:
    raise simulator.UnavailableError(
      f'{name!r} needs Gymnasium ({error}): pip install "rlinf-jax[gymnasium]".'
    ) from None
  return Gymnasium(gymnasium.make(name, **settings))


class Gymnasium:
  """A Gymnasium environment behind the `simulator.Environment` interface.

  Observations become float32, choices one-hot vectors; images stay uint8. A
  discrete action is its index.
  """

  def __init__(
    self, env: Any, prepare: Callable[[int], Any] = lambda seed: None
  ):
    """Reads the spaces.

    Args:
      env: a `gymnasium.Env`.
      prepare: is called with the seed before each reset, for what an
        environment does not draw from it.
    """
    self._prepare = prepare
    self._env, self._actions = env, Actions(env.action_space)
    self._space = env.observation_space
    self.spec = simulator.Spec(
      obs=obs_arrays(self._space),
      low=self._actions.low,
      high=self._actions.high,
      horizon=_horizon(env),
      image=self._image(),
      choices=self._actions.choices,
    )

  def reset(self, seed: int) -> simulator.Tree:
    self._prepare(seed)
    return read(self._env.reset(seed=seed)[0], self._space)

  def step(self, action_A: np.ndarray) -> simulator.Step:
    obs, reward, terminated, truncated, info = self._env.step(
      self._actions.one(action_A)
    )
    success = info.get('success', info.get('is_success', False))
    return simulator.Step(
      obs=read(obs, self._space),
      reward=float(reward),
      terminated=bool(terminated),
      truncated=bool(truncated),
      success=bool(success),
    )

  def render(self) -> np.ndarray:
    return downsample(self._env.render())

  def _image(self) -> simulator.Array | None:
    if self._env.render_mode != 'rgb_array':
      return None
    self.reset(0)
    try:
      shape = self.render().shape
    except Exception:  # noqa: BLE001 Reported when a video is recorded.
      shape = 1, 1, 3
    return simulator.Array(shape, 'uint8')

  def close(self):
    self._env.close()


class Actions:
  """Converts action vectors to the actions of a Gymnasium space.

  Attributes:
    low: lower bounds, [A].
    high: upper bounds, [A].
    choices: number of choices of each dimension; empty for a Box.
  """

  def __init__(self, space: Any):
    """Reads a Box, Discrete, MultiDiscrete or MultiBinary space."""
    self._space, self.choices = space, ()
    counts = _choices(space)
    if counts is None and hasattr(space, 'n'):  # A MultiBinary.
      counts = np.full(math.prod(space.shape), 2)
    if counts is not None:
      self.choices = tuple(counts.tolist())
      low, high = np.zeros(len(counts)), counts - 1
    elif getattr(space, 'low', None) is not None:
      low, high = space.low.ravel(), space.high.ravel()
    else:
      raise ValueError(
        f'The action space is {space}: it must be a Box, Discrete, '
        'MultiDiscrete or MultiBinary.'
      )
    self.low, self.high = low.astype(np.float32), high.astype(np.float32)

  def one(self, action_A: np.ndarray):
    """The action of one environment."""
    action = self.batch(action_A[None])[0]
    return int(action) if self.choices and not self._space.shape else action

  def batch(self, action_BA: np.ndarray) -> np.ndarray:
    """The actions of a batch of environments."""
    space = self._space
    action_BA = np.clip(action_BA, self.low, self.high)
    if self.choices or np.issubdtype(space.dtype, np.integer):
      action_BA = np.rint(action_BA)
    action = action_BA.reshape(-1, *space.shape).astype(space.dtype)
    return action + getattr(space, 'start', 0) if self.choices else action


def downsample(frame: np.ndarray) -> np.ndarray:
  """Averages squares of pixels until no edge is longer than MAX_SIZE."""
  height, width, colors = frame.shape
  s = -(-max(height, width) // MAX_SIZE)
  cropped = frame[: height // s * s, : width // s * s]
  return (
    cropped.reshape(height // s, s, width // s, s, colors)
    .mean((1, 3))
    .astype(np.uint8)
  )


def obs_arrays(space) -> simulator.Tree:
  """The observations of a space as a tree of `simulator.Array`.

  The parts of a Tuple are named by their number. A choice becomes a one-hot
  vector. A slash in a name separates it as the names of nested spaces are.
  """
  if (children := _children(space)) is not None:
    parts = {name: obs_arrays(child) for name, child in children.items()}
    return simulator.tree(simulator.leaves(parts))
  if (counts := _choices(space)) is not None:
    return simulator.Array((int(counts.sum()),), 'float32')
  if space.shape is None:
    raise ValueError(
      f'The observation space is {space}: it must be of arrays, choices, or a '
      'Dict or Tuple of these.'
    )
  if len(space.shape) == 3 and space.dtype == np.uint8:
    return simulator.Array(space.shape, 'uint8')
  return simulator.Array((math.prod(space.shape),), 'float32')


def _children(space) -> Mapping[str, Any] | None:
  """The spaces of a Dict or Tuple, by name; None for others."""
  children = getattr(space, 'spaces', None)
  if isinstance(children, Mapping):
    return children
  # A OneOf has parts, too, of which an observation is one.
  if isinstance(space, Sequence):
    return {str(i): child for i, child in enumerate(children)}
  return None


def _choices(space) -> np.ndarray | None:
  """Number of choices of each number of a space; None if it has others."""
  counts = getattr(space, 'nvec', getattr(space, 'n', None))
  # A MultiBinary has as many numbers as its n says, each 0 or 1.
  is_choice = counts is not None and hasattr(space, 'start')
  return np.ravel(counts) if is_choice else None


def _horizon(env) -> int:
  """Maximum steps of an episode."""
  limit = env.spec.max_episode_steps if env.spec else None
  if limit is None:
    raise ValueError(
      'Its episodes have no limit of steps: give it `max_episode_steps`.'
    )
  return limit


def read(obs, space, rows=(), array=np.asarray) -> simulator.Tree:
  """An observation as the arrays that `obs_arrays` describes.

  Args:
    obs: of one environment, or of a batch.
    space: of one environment.
    rows: leading dimensions of a batch.
    array: converts a leaf of `obs` to a NumPy array.
  """
  if (children := _children(space)) is not None:
    parts = (
      obs if isinstance(obs, Mapping) else dict(zip(children, obs, strict=True))
    )
    found = {
      name: read(parts[name], child, rows, array)
      for name, child in children.items()
    }
    return simulator.tree(simulator.leaves(found))
  want = obs_arrays(space)
  if (counts := _choices(space)) is not None:
    index = array(obs).reshape(*rows, -1) - np.ravel(space.start)
    one_hot = [
      index[..., i, None] == np.arange(n) for i, n in enumerate(counts)
    ]
    return np.concatenate(one_hot, -1).astype(want.dtype)
  return array(obs).astype(want.dtype, copy=False).reshape(*rows, *want.shape)
