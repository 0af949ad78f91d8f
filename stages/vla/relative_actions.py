"""Actions relative to the robot's state, as π0 is often trained on them.

openpi (`DeltaActions`) and LeRobot (`use_relative_actions`) subtract the state
at the time when a chunk is decided from all actions of that chunk, before they
are normalized. What acts adds it again to un-normalized actions. A mask says
which numbers of an action are relative. Number i is that of number i of the
state, both in the units of the robot.
"""

import jax
import jax.numpy as jnp
import numpy as np

# True for all numbers but the last, which is a gripper's; False for none; or
# whether each number is. Numbers behind the end of a mask are absolute.
RelativeActions = bool | tuple[bool, ...]


def mask(
  relative: RelativeActions, width: int, state_width: int
) -> np.ndarray | None:
  """Whether each number of an action is relative, [A].

  Args:
    relative: which ones are.
    width: A, numbers of an action.
    state_width: numbers of the robot's state; 0 without one.

  Returns:
    The mask; None if all numbers are absolute.

  Raises:
    ValueError: if the mask is longer than an action, or the state too short.
  """
  if isinstance(relative, bool):
    chosen = [relative] * (width - 1)
  else:
    chosen = [bool(x) for x in relative]
  if len(chosen) > width:
    raise ValueError(
      f'`relative_actions` has {len(chosen)} entries, and actions have {width} '
      'numbers: give one for each of them.'
    )
  found = np.zeros(width, bool)
  found[: len(chosen)] = chosen
  if not found.any():
    return None
  if np.flatnonzero(found)[-1] >= state_width:
    raise ValueError(
      f'Number {np.flatnonzero(found)[-1]} of actions is relative to the same '
      f'number of the state, and the state has {state_width} numbers: name the '
      'state that actions are relative to, or set its entry of '
      '`relative_actions` to False.'
    )
  return found


def offset(mask_A: np.ndarray, state):
  """The part of the state that actions are relative to, [..., A].

  Args:
    mask_A: as `mask` returns it.
    state: the state in the units of the robot, [..., O].
  """
  width = min(len(mask_A), state.shape[-1])
  own = jnp.where(_leading(mask_A[:width], state), state[..., :width], 0.0)
  padding = [(0, 0)] * (own.ndim - 1) + [(0, len(mask_A) - width)]
  return jnp.pad(own, padding)


def subtract(mask_A: np.ndarray | None, action, state) -> np.ndarray:
  """Actions relative to the state, of arrays in memory.

  Args:
    mask_A: as `mask` returns it.
    action: actions [N, A], or chunks of them [N, Z, A].
    state: the state of each row [N, O], at the time when it is decided; None
      if all actions are absolute.
  """
  if mask_A is None:
    return action
  # A plan's flow may be recorded meanwhile, and these are numbers.
  with jax.ensure_compile_time_eval():
    taken = np.asarray(offset(mask_A, jnp.asarray(state)))
  return action - (taken[:, None] if action.ndim == 3 else taken)


def _leading(x_A, like):
  """A vector in the rank of `like`."""
  return jnp.asarray(x_A).reshape((1,) * (like.ndim - 1) + (-1,))
