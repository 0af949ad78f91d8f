"""An arm of two joints in the plane reaches for a point."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base
from stages.envs import drawing, vectorize

SPEED = 0.15  # Radians a step.
LINK = 0.5  # Length of each half of the arm.
NEAR = 0.05  # Between its tip and the goal: close enough.
THICK = 0.04  # Half of what a link is across.
GOAL, ARM, TIP = (0.2, 0.7, 0.3), (0.45, 0.45, 0.5), (0.2, 0.35, 0.8)


class Arm(NamedTuple):
  """How the arm is bent, and where its tip shall be.

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
  horizon: int = 40,
  image_size: int | None = None,
) -> base.Env:
  """The world in which the tip of an arm shall be at a goal.

  Args:
    dense: whether the reward says how near the tip is, or success alone.
    terminate: whether success ends an episode for good.
    horizon: steps after which an episode is truncated.
    image_size: edge in pixels of a rendered image. The observation is then the
      image and the state of the arm; None for one vector with the goal in it.
  """

  def judge(arm: Arm):
    off_X = arm.goal - tip(arm.angle)
    far = jnp.sqrt(off_X @ off_X + 1e-12)
    success = (far < NEAR).astype(far.dtype)
    return (1.0 - jnp.tanh(5.0 * far) if dense else success), success

  task = vectorize.Task(begin, move, look, judge, scene, feel, 1.1)
  return vectorize.env(
    task,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    horizon=horizon,
    terminate=terminate,
    image_size=image_size,
  )


def tip(angle_X):
  """Where the arm ends."""
  bend_X = jnp.cumsum(angle_X)
  return LINK * jnp.stack([jnp.cos(bend_X).sum(), jnp.sin(bend_X).sum()])


def begin(key) -> Arm:
  """Any bend, and the tip of another as the goal."""
  luck = jax.random.uniform(key, (4,), minval=-jnp.pi, maxval=jnp.pi)
  return Arm(luck[:2], tip(luck[2:]))


def move(arm: Arm, command_X) -> Arm:
  """Both joints turn as they are told."""
  return Arm(arm.angle + SPEED * command_X, arm.goal)


def look(arm: Arm):
  """Angles as points on a circle, the tip, and where the goal is from it."""
  at_X = tip(arm.angle)
  off_X = arm.goal - at_X
  circle = jnp.cos(arm.angle), jnp.sin(arm.angle)
  return jnp.concatenate([*circle, at_X, arm.goal, off_X])


def feel(arm: Arm):
  """Angles as points on a circle, and the tip."""
  return jnp.concatenate(
    [jnp.cos(arm.angle), jnp.sin(arm.angle), tip(arm.angle)]
  )


def scene(arm: Arm) -> list[drawing.Stroke]:
  """The arm over the goal."""
  angle = arm.angle[0]
  shoulder_X, at_X = jnp.zeros(2), tip(arm.angle)
  elbow_X = LINK * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
  return [
    drawing.disc(arm.goal, 2 * NEAR, GOAL),
    drawing.Stroke(shoulder_X, elbow_X, THICK, ARM),
    drawing.Stroke(elbow_X, at_X, THICK, ARM),
    drawing.disc(at_X, NEAR, TIP),
  ]
