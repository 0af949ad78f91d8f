"""The state of each step of an episode, and the actions that follow it."""

from collections.abc import Mapping

import numpy as np

from rlinf_jax.data.episode_files import base
from stages.envs import demonstrations
from stages.vla import relative_actions as relative_lib


def relative_mask(
  data: base.Folder,
  action: str,
  state: str | None,
  relative: relative_lib.RelativeActions,
) -> np.ndarray | None:
  """Whether each number of an action is relative; None if all are absolute.

  Args:
    data: the folder, which has these features.
    action: name of the feature with actions.
    state: name of the feature with the robot's state; None for none.
    relative: which ones are, see `relative_actions.mask`.

  Raises:
    ValueError: as `relative_actions.mask`.
  """
  width, state_width = (
    data.features[name].shape[0] if name else 0 for name in (action, state)
  )
  return relative_lib.mask(relative, width, state_width)


def of_episode(
  columns: Mapping[str, np.ndarray],
  action: str,
  state: str | None,
  mask_A: np.ndarray | None,
  chunk: int,
) -> tuple[np.ndarray | None, np.ndarray]:
  """The state of each step and its next actions, in the units of the robot.

  Beyond the end of the episode, the last action is repeated.

  Args:
    columns: of the episode, as `base.Folder.read_numbers` returns them.
    action: name of the column with actions.
    state: name of the column with the robot's state; None for none.
    mask_A: as `relative_mask` returns it.
    chunk: Z, actions of a step.

  Returns:
    The state [T, O], or None, and actions [T, A], or [T, Z, A] of several.
  """
  T = len(columns[action])
  # A vector of one number is stored as a number.
  vector = lambda name: columns[name].astype(np.float32).reshape(T, -1)
  here, moves = vector(state) if state else None, vector(action)
  if chunk > 1:
    moves = demonstrations.following(moves[None], np.array([T]), chunk)[0]
  return here, relative_lib.subtract(mask_A, moves, here)
