"""A gripper in the plane pushes a puck to a goal.

The gripper is a disc that moves as commanded. The puck is another disc without
dynamics of its own: where the two would overlap, it gives way along the line
between their centers. It therefore slips off sideways unless pushed from
behind, which is what there is to learn.

With instructions, there are two discs, and words say to which of them: the
picture does not tell.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base, ranges
from stages.envs import drawing, vectorize
from stages.envs import env as env_lib

SPEED = 0.08  # Distance a step; the table is 2 wide.
TOUCH = 0.16  # Distance of the centers of gripper and puck in contact.
NEAR = 0.06  # Distance of puck and goal that counts as success.
GOAL, PUCK, GRIPPER = (0.2, 0.7, 0.3), (0.85, 0.3, 0.2), (0.2, 0.35, 0.8)
# Colors of the two discs where words say which one is the goal.
DISCS = {'green': GOAL, 'yellow': (0.95, 0.85, 0.25)}
INSTRUCTIONS = tuple(f'push the puck to the {color} disc' for color in DISCS)


class Table(NamedTuple):
  """Positions within −1 … 1 on both axes.

  Attributes:
    gripper: of the gripper.
    puck: of the puck.
    goal: of the disc to which the puck is to be pushed.
    other: of the other disc; `()` where there is one only.
    instruction: index of the goal among `DISCS`; likewise.
    progress: by how much the last step has raised `dense_reward`.
  """

  gripper: Float[Array, ' X']
  puck: Float[Array, ' X']
  goal: Float[Array, ' X']
  other: Any = ()
  instruction: Any = ()
  progress: Any = 0.0


def push(
  *,
  dense: bool = True,
  terminate: bool = False,
  progress: ranges.NonNegativeFloat = 0.0,
  horizon: ranges.PositiveInt = 50,
  image_size: ranges.PositiveInt | None = None,
  table: tuple[float, float, float] = drawing.BACKGROUND,
  instructions: Callable[[Sequence[str]], base.Prompt] | None = None,
) -> env_lib.Env:
  """Makes the environment.

  Args:
    dense: whether the reward grows with closeness; otherwise it is success.
    terminate: whether success terminates an episode.
    progress: weight of the progress that is added to the reward of success: by
      how much a step has raised `dense_reward`, as RLinf's relative rewards.
      Its sum over an episode depends on where it ends, not on how long it
      takes. It needs `dense = False`.
    horizon: steps after which an episode is truncated.
    image_size: edge of an image of the table, in pixels. The observation is
      then the image and the gripper's position; None for a vector with all
      positions.
    table: its color in images, red, green and blue of 0 … 1. A model that
      reads bytes of 0 … 255 as −1 … 1 learns faster where it is grey, so that
      empty places are zero.
    instructions: encodes texts as tokens, such as
      `instructions.openvla`. There are then two discs of different colors, and
      an observation with an image has the tokens of one of `INSTRUCTIONS`,
      drawn at the reset. A vector holds the position of the goal. None for one
      disc and no words.

  Raises:
    ValueError: for progress beside a reward that is dense already.
  """
  if dense and progress:
    raise ValueError(
      f'A weight of progress, {progress}, is given, and the reward is dense '
      'already: set `dense = False`, or leave out `progress`.'
    )

  def reward(table: Table):
    success = _norm(table.goal - table.puck) < NEAR
    success = success.astype(table.puck.dtype)
    if dense:
      return dense_reward(table), success
    return success + progress * table.progress, success

  task = vectorize.Task(
    reset if instructions is None else reset_discs,
    step,
    observe,
    reward,
    render,
    proprioception,
    background=table,
    instruction=lambda table: table.instruction,
  )
  return vectorize.env(
    task,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    horizon=horizon,
    terminate=terminate,
    image_size=image_size,
    instructions=instructions and instructions(INSTRUCTIONS),
  )


def reset(key) -> Table:
  """A puck near the middle, a goal 0.3 … 0.5 from it, a gripper anywhere."""
  uniform = jax.random.uniform(key, (6,))
  gripper_X, puck_X = 1.8 * uniform[:2] - 0.9, 0.8 * uniform[2:4] - 0.4
  angle, distance = 2 * jnp.pi * uniform[4], 0.3 + 0.2 * uniform[5]
  goal_X = puck_X + distance * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
  puck_X = _pushed(gripper_X, puck_X)
  return Table(gripper_X, puck_X, goal_X, progress=jnp.zeros_like(angle))


def reset_discs(key) -> Table:
  """As `reset`, with another disc 90° or more aside, seen from the puck."""
  table, key = reset(key), jax.random.fold_in(key, 1)
  uniform = jax.random.uniform(key, (3,))
  to_goal_X = table.goal - table.puck
  angle = jnp.arctan2(to_goal_X[1], to_goal_X[0])
  angle += jnp.pi * (0.5 + uniform[0])
  direction_X = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
  other_X = table.puck + (0.3 + 0.2 * uniform[1]) * direction_X
  instruction = (uniform[2] < 0.5).astype(jnp.int32)
  return table._replace(other=other_X, instruction=instruction)


def step(table: Table, action_X) -> Table:
  """Moves the gripper; the puck gives way."""
  gripper_X = jnp.clip(table.gripper + SPEED * action_X, -1.0, 1.0)
  puck_X = _pushed(gripper_X, table.puck)
  moved = table._replace(gripper=gripper_X, puck=puck_X)
  return moved._replace(progress=dense_reward(moved) - dense_reward(table))


def observe(table: Table):
  """All positions, gripper to puck, and puck to goal: [10]."""
  to_puck_X = table.puck - table.gripper
  to_goal_X = table.goal - table.puck
  return jnp.concatenate([*table[:3], to_puck_X, to_goal_X])


def proprioception(table: Table):
  """The position of the gripper, [2]."""
  return table.gripper


def render(table: Table) -> list[drawing.Stroke]:
  """The gripper over the puck over the goal, or over both discs."""
  discs = [table.goal]
  if len(table.other):
    is_first = table.instruction == 0
    both = table.goal, table.other
    discs = [jnp.where(is_first, *both), jnp.where(is_first, *both[::-1])]
  return [
    *(
      drawing.disc(at_X, 0.75 * TOUCH, color)
      for at_X, color in zip(discs, DISCS.values(), strict=False)
    ),
    drawing.disc(table.puck, TOUCH / 2, PUCK),
    drawing.disc(table.gripper, TOUCH / 2, GRIPPER),
  ]


def controller(obs_O):
  """A scripted controller that solves the task: `obs_O -> action_X`.

  It moves behind the puck, around it where the puck is in the way, and pushes.

  Args:
    obs_O: what `observe` returns.
  """
  to_puck_X, to_goal_X = obs_O[6:8], obs_O[8:10]
  distance, left = _norm(to_puck_X), _norm(to_goal_X)
  toward_X, ahead_X = to_puck_X / distance, to_goal_X / left
  # Behind the puck: push into it by the distance left to the goal.
  into = jnp.minimum(left, SPEED)
  push_X = to_puck_X - (TOUCH - into) * ahead_X
  around_X = to_puck_X - 1.5 * TOUCH * ahead_X
  # The puck is in the way: circle it on the nearer side.
  side_X = jnp.stack([-toward_X[1], toward_X[0]])
  side_X *= jnp.where(side_X @ around_X < 0, -1.0, 1.0)
  circle_X = SPEED * (side_X + (distance - 1.5 * TOUCH) / TOUCH * toward_X)
  behind = toward_X @ ahead_X > 0.95
  in_the_way = (toward_X @ ahead_X < 0.7) & (distance < 2.0 * TOUCH)
  move_X = jnp.where(behind, push_X, jnp.where(in_the_way, circle_X, around_X))
  return jnp.clip(move_X / SPEED, -1.0, 1.0) * (left > 0.5 * NEAR)


def dense_reward(table: Table):
  """1 with the puck at its goal and the gripper behind it; less elsewhere."""
  to_goal_X = table.goal - table.puck
  behind_X = table.puck - TOUCH * to_goal_X / _norm(to_goal_X)
  reaching = 1.0 - jnp.tanh(5.0 * _norm(behind_X - table.gripper))
  placing = 1.0 - jnp.tanh(5.0 * _norm(to_goal_X))
  return 0.25 * reaching + 0.75 * placing


def _pushed(gripper_X, puck_X):
  """Position of the puck after it gave way to the gripper."""
  away_X = puck_X - gripper_X
  distance = _norm(away_X)
  moved_X = gripper_X + TOUCH * away_X / distance
  return jnp.where(distance < TOUCH, jnp.clip(moved_X, -1.0, 1.0), puck_X)


def _norm(x_X):
  """Euclidean length, never zero."""
  return jnp.sqrt(x_X @ x_X + 1e-12)
