"""Somebody who can do a task of LIBERO, by what its states show.

What is done follows from what is seen now and nothing else, so that a policy
which sees the same can learn it.
"""

import jax.numpy as jnp

# Of an observation without pictures: the arm, and the first two things of a
# scene of `libero_object`, what shall be moved and the basket.
HAND, FINGERS, SPEED = slice(28, 31), slice(35, 37), slice(37, 39)
THING, BASKET = slice(39, 42), slice(53, 56)
REACH = 0.05  # Meters that an action of one asks for.
HIGH = 0.2  # Above the table, where things are carried.


def to_basket(obs_O, *, grip: tuple[float, float, float] = (-0.02, 0, 0)):
  """Picks up the thing and lets it fall into the basket: `obs_O -> action_A`.

  Args:
    obs_O: what is seen in a scene of `libero_object`.
    grip: where to grip it, from its middle, in meters. The palm is 20 cm wide
      and must not come down on what stands beside: the default is for the cream
      cheese.
  """
  hand_X, thing_X = obs_O[HAND], obs_O[THING]
  wide = obs_O[FINGERS][0] - obs_O[FINGERS][1]
  still = jnp.abs(obs_O[SPEED]).max() < 0.02
  off_X = thing_X + jnp.asarray(grip) - hand_X
  carry_X = (obs_O[BASKET] - thing_X)[:2]
  far = jnp.sqrt((off_X[:2] ** 2).sum())

  at = (far < 0.015) & (jnp.abs(off_X[2]) < 0.02)
  held = at & (wide < 0.07) & still
  there = jnp.abs(carry_X).max() < 0.05
  # Down a funnel: the lower, the nearer.
  height = thing_X[2] - 0.003 + jnp.clip(6.0 * (far - 0.006), 0.0, 0.1)
  approach_X = jnp.append(off_X[:2] / 0.06, (height - hand_X[2]) / 0.03)
  over = hand_X[2] > 0.6 * HIGH
  up = (HIGH - hand_X[2]) / REACH
  lift_X = jnp.append(jnp.where(over, carry_X / REACH, 0.0), up)
  move_X = jnp.where(held, lift_X, jnp.where(at, 0.0, approach_X))
  move_X = jnp.where(there, 0.0, jnp.clip(move_X, -1.0, 1.0))
  close = jnp.where(at & ~there, 1.0, -1.0)
  return jnp.concatenate([move_X, jnp.zeros(3), close[None]])
