"""A scripted controller that puts the object on the plate, from its state.

Each action follows from the current observation alone, so that a policy with
the same observations can learn it. It is for `task = 'PutOnPlate-v1'` and
`control_mode = 'pd_ee_delta_pose'`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlinf_jax.envs.put_on_plate import kinds

STEP = 0.1  # Meters and radians of an action of 1.
HOVER = 0.08  # Height above the object from which the open hand goes down.
CARRY = 0.07  # Height of the object's lower end above the table.
RELEASE = 0.012  # The same above the floor of the plate, to let go.
NEAR = 0.012  # Distance in the plane that counts as above a thing.
ALIGNED = 0.15  # Radians that count as aligned.
OPEN, CLOSED = 1.0, -1.0


class State(NamedTuple):
  """Parts of an observation behind joint angles and speeds.

  Attributes:
    tcp: position of the point between the fingers, [3].
    tcp_q: its rotation, as a quaternion with its real part first.
    is_grasped: whether the hand holds the object, [1].
    object: position of the object, [3].
    object_q: its rotation.
    half_size: half of its length, width and height, [3].
    plate: position of the plate, [3].
  """

  tcp: jax.Array
  tcp_q: jax.Array
  is_grasped: jax.Array
  object: jax.Array
  object_q: jax.Array
  half_size: jax.Array
  plate: jax.Array


def read(obs_O: jax.Array) -> State:
  """The parts of an observation."""
  sizes, start = (3, 4, 1, 3, 4, 3, 3), 18  # Nine angles, and as many speeds.
  parts = []
  for size in sizes:
    parts.append(obs_O[start : start + size])
    start += size
  return State(*parts)


def to_plate(obs_O: jax.Array) -> jax.Array:
  """Puts the object on the plate: `obs_O -> action_A`.

  Args:
    obs_O: an observation without pictures.
  """
  s = read(obs_O)
  grasped = s.is_grasped[0] > 0.5
  rise = lambda height: jnp.array([0.0, 0.0, height])
  plane = lambda x: jnp.linalg.norm(x[:2])
  yaw = _yaw_error(s)
  over_plate = plane(s.plate - s.object) < NEAR
  lower_end = s.object[2] - s.half_size[2]
  on_plate = (plane(s.plate - s.object) < 0.05) & (
    lower_end < kinds.PLATE_FLOOR + RELEASE
  )

  # The object is free: above it, down to it, close.
  above = (plane(s.object - s.tcp) < NEAR) & (jnp.abs(yaw) < ALIGNED)
  low = s.tcp[2] < s.object[2] + HOVER / 2
  at_object = jnp.linalg.norm(s.object - s.tcp) < NEAR
  lifted = s.tcp.at[2].set(s.object[2] + HOVER)
  reach = jnp.where(
    above,
    s.object,
    jnp.where(
      low & (plane(s.object - s.tcp) > 2 * NEAR),
      lifted,
      s.object + rise(HOVER),
    ),
  )
  # It is held: up, to the plate, down.
  carried = s.plate - s.object
  up = CARRY - lower_end
  carry = s.tcp + jnp.where(
    over_plate,
    carried + rise(kinds.PLATE_FLOOR + s.half_size[2] + RELEASE / 2),
    jnp.where(up > 0.03, rise(up), carried.at[2].set(up)),
  )
  let_go = on_plate & over_plate
  target = jnp.where(
    on_plate & ~grasped,
    s.tcp.at[2].set(0.2),
    jnp.where(grasped, jnp.where(let_go, s.tcp, carry), reach),
  )
  fingers = jnp.where(
    grasped,
    jnp.where(let_go, OPEN, CLOSED),
    jnp.where(at_object & ~on_plate, CLOSED, OPEN),
  )
  turn = jnp.where(grasped | on_plate, 0.0, yaw)
  rotation = _tilt_error(s.tcp_q) + rise(turn)
  # ManiSkill 3.0.1 scales rotations by their lower bound, so it turns back.
  motion = jnp.concatenate([target - s.tcp, -rotation]) / STEP
  return jnp.append(jnp.clip(motion, -1.0, 1.0), fingers)


def _axis(q: jax.Array, i: int) -> jax.Array:
  """The direction of an axis after a rotation."""
  w, v, e = q[0], q[1:], jnp.eye(3)[i]
  return e + 2 * jnp.cross(v, jnp.cross(v, e) + w * e)


def _tilt_error(q: jax.Array) -> jax.Array:
  """The rotation that turns the hand to point down."""
  return jnp.cross(_axis(q, 2), jnp.array([0.0, 0.0, -1.0]))


def _yaw_error(s: State) -> jax.Array:
  """The angle by which the hand is to turn to grasp across the width.

  The fingers move along the hand's y. An object as long as wide may be grasped
  along its length, too.
  """
  hand, along = _axis(s.tcp_q, 0), _axis(s.object_q, 0)
  angle = jnp.atan2(along[1], along[0]) - jnp.atan2(hand[1], hand[0])
  square = jnp.abs(s.half_size[0] - s.half_size[1]) < 1e-3
  period = jnp.where(square, jnp.pi / 2, jnp.pi)
  angle = angle - period * jnp.round(angle / period)
  # A ball that rolled may point up.
  return jnp.where(jnp.linalg.norm(along[:2]) > 0.5, angle, 0.0)
