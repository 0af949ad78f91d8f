"""A two-joint arm in the plane reaches for a point."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import ranges
from stages.envs import drawing, vectorize
from stages.envs import env as env_lib

SPEED = 0.15  # Radians a step.
LINK = 0.5  # Length of each of the two links.
NEAR = 0.05  # Distance of tip and goal that counts as success.
THICK = 0.04  # Half the width of a link.
GOAL, ARM, TIP = (0.2, 0.7, 0.3), (0.45, 0.45, 0.5), (0.2, 0.35, 0.8)


class Arm(NamedTuple):
  """Joint angles and the goal of the tip.

  Attributes:
    angle: of the first link to the axis and of the second to the first; there
      are as many joints as axes.
    goal: a point.
  """

  angle: Float[Array, ' X']
  goal: Float[Array, ' X']


def reach(
  *,
  dense: bool = True,
  terminate: bool = False,
  horizon: ranges.PositiveInt = 40,
  image_size: ranges.PositiveInt | None = None,
) -> env_lib.Env:
  """Makes the environment.

  Args:
    dense: whether the reward grows with closeness; otherwise it is success.
    terminate: whether success terminates an episode.
    horizon: steps after which an episode is truncated.
    image_size: edge of an image of arm and goal, in pixels. The observation is
      then the image and the state of the arm; None for a vector that includes
      the goal.
  """

  def reward(arm: Arm):
    offset_X = arm.goal - tip(arm.angle)
    distance = jnp.sqrt(offset_X @ offset_X + 1e-12)
    success = (distance < NEAR).astype(distance.dtype)
    return (1.0 - jnp.tanh(5.0 * distance) if dense else success), success

  task = vectorize.Task(
    reset, step, observe, reward, render, proprioception, extent=1.1
  )
  return vectorize.env(
    task,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    horizon=horizon,
    terminate=terminate,
    image_size=image_size,
  )


def tip(angle_X):
  """Position of the end of the arm: `[2] -> [2]`."""
  bend_X = jnp.cumsum(angle_X)
  return LINK * jnp.stack([jnp.cos(bend_X).sum(), jnp.sin(bend_X).sum()])


def reset(key) -> Arm:
  """Random angles, and the tip of other random angles as the goal."""
  angle = jax.random.uniform(key, (4,), minval=-jnp.pi, maxval=jnp.pi)
  return Arm(angle[:2], tip(angle[2:]))


def step(arm: Arm, action_X) -> Arm:
  """Turns both joints."""
  return Arm(arm.angle + SPEED * action_X, arm.goal)


def observe(arm: Arm):
  """Cosines and sines of the angles, tip, goal, and tip to goal: [10]."""
  tip_X = tip(arm.angle)
  offset_X = arm.goal - tip_X
  circle = jnp.cos(arm.angle), jnp.sin(arm.angle)
  return jnp.concatenate([*circle, tip_X, arm.goal, offset_X])


def proprioception(arm: Arm):
  """Cosines and sines of the angles, and the tip: [6]."""
  return jnp.concatenate(
    [jnp.cos(arm.angle), jnp.sin(arm.angle), tip(arm.angle)]
  )


def render(arm: Arm) -> list[drawing.Stroke]:
  """The arm over the goal."""
  angle = arm.angle[0]
  shoulder_X, tip_X = jnp.zeros(2), tip(arm.angle)
  elbow_X = LINK * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
  return [
    drawing.disc(arm.goal, 2 * NEAR, GOAL),
    drawing.Stroke(shoulder_X, elbow_X, THICK, ARM),
    drawing.Stroke(elbow_X, tip_X, THICK, ARM),
    drawing.disc(tip_X, NEAR, TIP),
  ]
