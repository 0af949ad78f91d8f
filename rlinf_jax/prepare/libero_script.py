"""A scripted controller for a task of LIBERO, from its state.

Each action follows from the current observation alone, so that a policy with
the same observations can learn it.
"""

import jax.numpy as jnp

# Of a state observation: the arm, and the first two objects of a scene of
# `libero_object`, the one to move and the basket.
HAND, FINGERS, SPEED = slice(28, 31), slice(35, 37), slice(37, 39)
OBJECT, BASKET = slice(39, 42), slice(53, 56)
STEP = 0.05  # Meters that an action of 1 commands.
CARRY_HEIGHT = 0.2  # Meters, at which objects are carried.


def to_basket(obs_O, *, grip: tuple[float, float, float] = (-0.02, 0, 0)):
  """Picks up the object and drops it into the basket: `obs_O -> action_A`.

  Args:
    obs_O: an observation of a scene of `libero_object`.
    grip: where to grip the object, from its center, in meters. The palm is
      20 cm wide and must not come down on neighbors: the default is for the
      cream cheese.
  """
  hand_X, object_X = obs_O[HAND], obs_O[OBJECT]
  opening = obs_O[FINGERS][0] - obs_O[FINGERS][1]
  still = jnp.abs(obs_O[SPEED]).max() < 0.02
  offset_X = object_X + jnp.asarray(grip) - hand_X
  carry_X = (obs_O[BASKET] - object_X)[:2]
  distance = jnp.sqrt((offset_X[:2] ** 2).sum())

  at_object = (distance < 0.015) & (jnp.abs(offset_X[2]) < 0.02)
  gripped = at_object & (opening < 0.07) & still
  over_basket = jnp.abs(carry_X).max() < 0.05
  # Down a funnel, centered on the object.
  height = object_X[2] - 0.003 + jnp.clip(6.0 * (distance - 0.006), 0.0, 0.1)
  approach_X = jnp.append(offset_X[:2] / 0.06, (height - hand_X[2]) / 0.03)
  lifted = hand_X[2] > 0.6 * CARRY_HEIGHT
  up = (CARRY_HEIGHT - hand_X[2]) / STEP
  lift_X = jnp.append(jnp.where(lifted, carry_X / STEP, 0.0), up)
  move_X = jnp.where(gripped, lift_X, jnp.where(at_object, 0.0, approach_X))
  move_X = jnp.where(over_basket, 0.0, jnp.clip(move_X, -1.0, 1.0))
  close = jnp.where(at_object & ~over_basket, 1.0, -1.0)
  return jnp.concatenate([move_X, jnp.zeros(3), close[None]])
