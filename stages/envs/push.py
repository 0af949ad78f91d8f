"""A gripper in the plane pushes a puck to where it shall be.

The gripper is a disc that goes where it is told, and the puck another that does
nothing of its own: where the two would overlap it gives way along the line
between them. So it slips off sideways unless it is pushed from behind, which is
what there is to learn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base
from stages.envs import drawing, vectorize

SPEED = 0.08  # A step; half of the table is 1.
TOUCH = 0.16  # Between the centers of gripper and puck where they touch.
NEAR = 0.06  # Between puck and goal: close enough.
GOAL, PUCK, GRIPPER = (0.2, 0.7, 0.3), (0.85, 0.3, 0.2), (0.2, 0.35, 0.8)


class Table(NamedTuple):
  """Where things are, within −1 … 1 on both axes."""

  gripper: Float[Array, ' X']
  puck: Float[Array, ' X']
  goal: Float[Array, ' X']


def push(
  *,
  dense: bool = True,
  terminate: bool = False,
  horizon: int = 50,
  image_size: int | None = None,
) -> base.Env:
  """The world in which a puck shall be pushed to a goal.

  Args:
    dense: whether the reward says how near things are, or success alone.
    terminate: whether success ends an episode for good.
    horizon: steps after which an episode is truncated.
    image_size: pixels along each edge of a picture of the table, by which puck
      and goal are seen then, and only the gripper is felt; None to be told
      where all things are.
  """

  def judge(at: Table):
    success = (_far(at.goal - at.puck) < NEAR).astype(at.puck.dtype)
    return (closeness(at) if dense else success), success

  task = vectorize.Task(begin, move, look, judge, scene, feel)
  return vectorize.env(
    task,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    horizon=horizon,
    terminate=terminate,
    image_size=image_size,
  )


def begin(key) -> Table:
  """A puck about the middle, a goal 0.3 to 0.5 from it, a gripper anywhere."""
  luck = jax.random.uniform(key, (6,))
  gripper_X, puck_X = 1.8 * luck[:2] - 0.9, 0.8 * luck[2:4] - 0.4
  angle, far = 2 * jnp.pi * luck[4], 0.3 + 0.2 * luck[5]
  goal_X = puck_X + far * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
  return Table(gripper_X, _pushed(gripper_X, puck_X), goal_X)


def move(at: Table, command_X) -> Table:
  """The gripper goes as it is told, and the puck gives way."""
  gripper_X = jnp.clip(at.gripper + SPEED * command_X, -1.0, 1.0)
  return Table(gripper_X, _pushed(gripper_X, at.puck), at.goal)


def look(at: Table):
  """Where things are, and where from each other."""
  to_puck_X, to_goal_X = at.puck - at.gripper, at.goal - at.puck
  return jnp.concatenate([*at, to_puck_X, to_goal_X])


def feel(at: Table):
  """Where the gripper is."""
  return at.gripper


def scene(at: Table) -> list[drawing.Stroke]:
  """The gripper over the puck over the goal."""
  return [
    drawing.disc(at.goal, 0.75 * TOUCH, GOAL),
    drawing.disc(at.puck, TOUCH / 2, PUCK),
    drawing.disc(at.gripper, TOUCH / 2, GRIPPER),
  ]


def show_how(obs_O):
  """What somebody does who can: goes behind the puck, and pushes.

  Args:
    obs_O: what is seen.

  Returns:
    A command.
  """
  to_puck_X, to_goal_X = obs_O[6:8], obs_O[8:10]
  far, left = _far(to_puck_X), _far(to_goal_X)
  toward_X, ahead_X = to_puck_X / far, to_goal_X / left
  # Behind it: into it by what is left to go.
  into = jnp.minimum(left, SPEED)
  push_X = to_puck_X - (TOUCH - into) * ahead_X
  around_X = to_puck_X - 1.5 * TOUCH * ahead_X
  # In the way: along a circle about the puck, on the nearer side.
  side_X = jnp.stack([-toward_X[1], toward_X[0]])
  side_X *= jnp.where(side_X @ around_X < 0, -1.0, 1.0)
  circle_X = SPEED * (side_X + (far - 1.5 * TOUCH) / TOUCH * toward_X)
  behind = toward_X @ ahead_X > 0.95
  in_the_way = (toward_X @ ahead_X < 0.7) & (far < 2.0 * TOUCH)
  go_X = jnp.where(behind, push_X, jnp.where(in_the_way, circle_X, around_X))
  return jnp.clip(go_X / SPEED, -1.0, 1.0) * (left > 0.5 * NEAR)


def closeness(at: Table):
  """1 where the puck is at its goal and the gripper behind it, else less."""
  to_goal_X = at.goal - at.puck
  behind_X = at.puck - TOUCH * to_goal_X / _far(to_goal_X)
  reach = 1.0 - jnp.tanh(5.0 * _far(behind_X - at.gripper))
  place = 1.0 - jnp.tanh(5.0 * _far(to_goal_X))
  return 0.25 * reach + 0.75 * place


def _pushed(gripper_X, puck_X):
  """Where the puck goes when the gripper is there."""
  away_X = puck_X - gripper_X
  far = _far(away_X)
  given_X = gripper_X + TOUCH * away_X / far
  return jnp.where(far < TOUCH, jnp.clip(given_X, -1.0, 1.0), puck_X)


def _far(x_X):
  """Length, never quite zero."""
  return jnp.sqrt(x_X @ x_X + 1e-12)
