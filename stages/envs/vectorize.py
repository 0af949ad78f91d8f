"""Makes a batched `Env` with automatic resets of one environment in JAX.

A task defines how a single environment resets, steps, is observed and rewarded.
Ends of episodes, same-step resets that keep the final observation, and image
observations are the same for all tasks and implemented here.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from stages import base
from stages.envs import drawing
from stages.envs import env as env_lib

CAMERA = 'table'  # Name of the only camera, which looks from above.


class VectorState(NamedTuple):
  """State of a batch of environments.

  Attributes:
    seed: seed that all randomness of an environment follows from.
    episode: number of episodes that have ended.
    time: steps of the current episode so far.
    task_state: the task's own state.
  """

  seed: Int[Array, ' B']
  episode: Int[Array, ' B']
  time: Int[Array, ' B']
  task_state: Any


class Task(NamedTuple):
  """One environment, as functions of its state.

  Attributes:
    reset: `key -> state` at the beginning of an episode.
    step: `state, action_A -> state`.
    observe: `state -> obs_O`, a vector of everything there is to know.
    reward: `state -> reward, success` of having reached a state; scalars,
      success 0 or 1.
    render: `state -> strokes` of an image, the lowest first; None for a task
      without images.
    proprioception: `state -> vector` of what a robot knows of itself, the
      observation beside its image; needed for image observations only.
    extent: images span −extent … extent on both axes.
    background: color of images where there is no stroke.
    instruction: `state -> index` of what is to be done, among the instructions;
      None for a task that has one purpose only.
  """

  reset: Callable[[base.Key], Any]
  step: Callable[[Any, jax.Array], Any]
  observe: Callable[[Any], jax.Array]
  reward: Callable[[Any], tuple[jax.Array, jax.Array]]
  render: Callable[[Any], list[drawing.Stroke]] | None = None
  proprioception: Callable[[Any], jax.Array] | None = None
  extent: float = 1.0
  background: tuple[float, float, float] = drawing.BACKGROUND
  instruction: Callable[[Any], jax.Array] | None = None


def env(
  task: Task,
  *,
  action_low: tuple[float, ...] = (),
  action_high: tuple[float, ...] = (),
  action_choices: tuple[int, ...] = (),
  horizon: int,
  terminate: bool,
  image_size: int | None = None,
  instructions: base.Prompt | None = None,
) -> env_lib.Env:
  """Makes a batched environment of a task.

  Args:
    task: one environment.
    action_low: lower bound of each action dimension.
    action_high: upper bound of each action dimension.
    action_choices: number of choices of each dimension where actions are
      discrete, in place of bounds. `task.step` then takes their indices.
    horizon: steps after which an episode is truncated.
    terminate: whether success terminates an episode.
    image_size: edge of an image observation, in pixels. The observation is then
      {'image': {'table': uint8 [size, size, 3]}, 'state': proprioception}.
      None: it is the task's observation vector.
    instructions: tokens of what `task.instruction` counts, one a row. An
      observation with an image then also has the row of its episode, as
      {'prompt': {'token': [P], 'mask': [P]}}.

  Raises:
    ValueError: if images are asked of a task that renders none.
  """
  if image_size and not task.render:
    raise ValueError(
      'This task has no `render`, so it has no images: leave out `image_size`, '
      'or give the task a `render`.'
    )

  if action_choices:
    action_low = (0.0,) * len(action_choices)
    action_high = tuple(n - 1.0 for n in action_choices)

  def image(task_state, size):
    return drawing.image(
      task.render(task_state), size, task.extent, task.background
    )

  # Jitted, as `step` is: a chunk of actions is many steps, and each of them
  # observes twice. So both are traced and lowered once for all of them.
  @jax.jit
  def observe(task_state):
    if image_size is None:
      return task.observe(task_state)
    images = {CAMERA: image(task_state, image_size)}
    obs = {'image': images, 'state': task.proprioception(task_state)}
    if instructions is not None:
      row = task.instruction(task_state)
      obs[base.PROMPT] = {
        name: jnp.asarray(x)[row] for name, x in instructions._asdict().items()
      }
    return obs

  def render(state_B: VectorState, size: int = drawing.SIZE):
    return jax.vmap(lambda state: image(state, size))(state_B.task_state)

  def init(seed):
    state = _reset(task, seed, jnp.zeros_like(seed))
    return state, observe(state.task_state)

  step = functools.partial(_step, task, observe, horizon, terminate)
  obs_spec = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.int32))[1]
  return env_lib.Env(
    jax.vmap(init),
    jax.jit(jax.vmap(step)),
    obs_spec,
    action_low,
    action_high,
    horizon,
    action_choices,
    render=render if task.render else None,
  )


def _reset(task: Task, seed, episode) -> VectorState:
  """State of one environment at the beginning of an episode."""
  key = jax.random.fold_in(jax.random.key(seed), episode)
  return VectorState(seed, episode, jnp.zeros_like(seed), task.reset(key))


def _step(
  task: Task,
  observe: Callable,
  horizon: int,
  terminate: bool,
  old: VectorState,
  action_A,
) -> tuple[VectorState, env_lib.TimeStep]:
  """A step of one environment, and its reset where an episode ends."""
  task_state, time = task.step(old.task_state, action_A), old.time + 1
  final_obs = observe(task_state)
  reward, success = task.reward(task_state)
  terminated = success if terminate else jnp.zeros_like(success)
  truncated = (time >= horizon) * (1.0 - terminated)
  done = (terminated + truncated) > 0
  final_state = VectorState(old.seed, old.episode, time, task_state)
  state = jax.tree.map(
    lambda new, same: jnp.where(done, new, same),
    _reset(task, old.seed, old.episode + 1),
    final_state,
  )
  timestep = env_lib.TimeStep(
    obs=observe(state.task_state),
    reward=reward,
    terminated=terminated,
    truncated=truncated,
    final_obs=final_obs,
    success=success,
    final_state=final_state,
  )
  return state, timestep
