"""From one environment to a `Env`: many of them, episode after episode.

What a task has to say is how one environment begins, moves, looks and is
judged. That it ends, and begins anew at once without losing what was seen last,
is the same for all of them and said here, and so is how it is seen in pictures.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from stages import base
from stages.envs import drawing

CAMERA = 'table'  # The name of the only one, which looks from above.


class Running(NamedTuple):
  """Environments in the middle of their episodes.

  Attributes:
    seed: what all luck of an environment comes from.
    episode: how many ended before this one.
    time: steps made in it.
    place: of all things, as the task has them.
  """

  seed: Int[Array, ' B']
  episode: Int[Array, ' B']
  time: Int[Array, ' B']
  place: Any


class Task(NamedTuple):
  """One environment, as functions of where things are.

  Attributes:
    begin: `key -> place`.
    move: `place, command_A -> place`.
    look: `place -> obs`, a vector of all there is to know.
    judge: `place -> reward, success`, of having come there; both of 0 to 1.
    scene: `place -> strokes` of a picture; None for what is not drawn.
    feel: `place -> state`, what a robot knows with its eyes closed, beside its
      picture.
    reach: how far from the middle there is something to be seen.
  """

  begin: Callable[[base.Key], Any]
  move: Callable[[Any, Any], Any]
  look: Callable[[Any], Any]
  judge: Callable[[Any], tuple[Any, Any]]
  scene: Callable[[Any], list[drawing.Stroke]] | None = None
  feel: Callable[[Any], Any] | None = None
  reach: float = 1.0


def env(
  task: Task,
  *,
  action_low: tuple[float, ...],
  action_high: tuple[float, ...],
  horizon: int,
  terminate: bool,
  image_size: int | None = None,
) -> base.Env:
  """The world of a task.

  Args:
    task: one environment.
    action_low: the least of each dimension of a command.
    action_high: the most.
    horizon: steps after which an episode is truncated.
    terminate: whether success ends an episode for good.
    image_size: pixels along each edge of what is seen: then an observation is
      {'image': {'table': uint8 [size, size, 3]}, 'state': what the
      robot feels}. None: it is the vector that the task looks like.
  """
  if image_size and not task.scene:
    raise ValueError(
      'This task has no scene, so there are no pictures of it: leave out '
      '`image_size`, or say what is to be drawn.'
    )

  def picture(place, size):
    return drawing.picture(task.scene(place), size, task.reach)

  def look(place):
    if image_size is None:
      return task.look(place)
    image = {CAMERA: picture(place, image_size)}
    return {'image': image, 'state': task.feel(place)}

  def drawn(state_B: Running, size: int = drawing.SIZE):
    return jax.vmap(lambda place: picture(place, size))(state_B.place)

  def start(seed, episode) -> Running:
    key = jax.random.fold_in(jax.random.key(seed), episode)
    return Running(seed, episode, jnp.zeros_like(seed), task.begin(key))

  def init(seed):
    now = start(seed, jnp.zeros_like(seed))
    return now, look(now.place)

  def step(old: Running, command_A):
    place, time = task.move(old.place, command_A), old.time + 1
    final_obs = look(place)
    reward, success = task.judge(place)
    terminated = success if terminate else jnp.zeros_like(success)
    truncated = (time >= horizon) * (1.0 - terminated)
    done = (terminated + truncated) > 0
    final_state = Running(old.seed, old.episode, time, place)
    now = jax.tree.map(
      lambda new, same: jnp.where(done, new, same),
      start(old.seed, old.episode + 1),
      final_state,
    )
    timestep = base.TimeStep(
      *(look(now.place), reward, terminated, truncated, final_obs, success),
      final_state=final_state,
    )
    return now, timestep

  like = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.int32))[1]
  return base.Env(
    *(jax.vmap(init), jax.vmap(step), like),
    *(action_low, action_high, horizon),
    render=drawn if task.scene else None,
  )
