"""A scripted controller that pushes the cube to the goal, from its position.

Each action follows from the current observation alone, so that a policy with
the same observations can learn it. It is for `task = 'PushCube-v1'` of
ManiSkill and `control_mode = 'pd_ee_delta_pos'`.
"""

import jax
import jax.numpy as jnp

STEP = 0.1  # Meters of an action of 1.
START = -0.16  # Start of a push along x, in meters: behind any cube.
HIGH, LOW = 0.1, 0.025  # Heights of the hand: on its way, and in a push.
REACHED = 0.03  # From the start, along x, at which the hand goes down.
ALIGNED = 0.015  # From the cube, along y, at which the hand goes down.
LOST = 0.04  # The same beyond which a push is given up.
ADVANCE = 0.08  # Meters a step of pushing aims at.
CLOSED = -1.0  # Fingers.


def push(obs_O: jax.Array) -> jax.Array:
  """Pushes the cube to the goal: `obs_O -> action_A`.

  The hand moves behind the cube, goes down, and pushes.

  Args:
    obs_O: an observation without pictures: nine joint angles, as many speeds,
      the pose of the hand, the position of the goal, and the pose of the cube.
  """
  tcp, cube = obs_O[18:21], obs_O[28:31]
  aside = jnp.abs(tcp[1] - cube[1])
  is_behind = (tcp[0] < START + REACHED) & (aside < ALIGNED)
  is_low = tcp[2] < (LOW + HIGH) / 3
  is_pushing = is_low & (aside < LOST)
  x = jnp.where(is_pushing, tcp[0] + ADVANCE, jnp.where(is_low, tcp[0], START))
  z = jnp.where(is_behind | is_pushing, LOW, HIGH)
  motion = (jnp.stack([x, cube[1], z]) - tcp) / STEP
  return jnp.append(jnp.clip(motion, -1.0, 1.0), CLOSED)
