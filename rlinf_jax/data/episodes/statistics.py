"""Statistics of episodes on disk, in the form that OpenVLA's models store.

Quantiles are those of all steps. LeRobot's meta/stats.json is not used: its are
means of the quantiles of single episodes.
"""

import functools
from typing import Any

import numpy as np

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.episodes import chunks, folders
from stages import ranges
from stages.vla import relative_actions as relative_lib

# Statistics of π0 and π0.5, and those of a number that stays as it is.
AS_IT_IS = {'mean': 0.0, 'std': 1.0, 'q01': -1.0, 'q99': 1.0}


@functools.cache
def norm_stats(
  folder: str,
  *,
  name: str | None = None,
  action: str = base.ACTION,
  state: str | None = base.STATE,
  action_normalization_mask: tuple[bool, ...] | None = None,
) -> dict[str, Any]:
  """Statistics by data set, as dataset_statistics.json has them.

  Args:
    folder: a folder that `folders.read` reads.
    name: of the data set; if None, that of dataset_info.json in RLDS, and that
      of the folder in LeRobot's format.
    action: name of the feature with actions.
    state: name of the feature with the robot's state; None for none.
    action_normalization_mask: whether each number of an action is normalized;
      the others, such as a gripper's, stay as they are. None for all.

  Raises:
    ValueError: if the folder has no such features, or the mask is not of the
      length of an action.
  """
  data = folders.read(folder)
  entry = {}
  parts = {'action': action} | ({'proprio': state} if state else {})
  for part, key in parts.items():
    data.check_feature(key, 'vector', pictures=False)
    columns = data.read_numbers(data.episodes, [key])
    x = np.concatenate([column[key] for column in columns])
    # A vector of one number is stored as a number.
    x = x.reshape(len(x), -1).astype(np.float64)
    kept = action_normalization_mask if part == 'action' else None
    entry[part] = _of(x) | {'mask': _checked_mask(kept, x.shape[1])}
  entry['num_transitions'] = sum(x.length for x in data.episodes)
  entry['num_trajectories'] = len(data.episodes)
  return {name or data.name: entry}


def _checked_mask(mask: tuple[bool, ...] | None, width: int) -> list[bool]:
  if mask is None:
    return [True] * width
  if len(mask) != width:
    raise ValueError(
      f'`action_normalization_mask` has {len(mask)} entries, and actions have '
      f'{width} numbers: give one for each of them.'
    )
  return [bool(x) for x in mask]


def _of(x) -> dict[str, list[float]]:
  """Statistics of the columns of an array."""
  low, high = np.quantile(x, [0.01, 0.99], axis=0)
  return {
    'mean': x.mean(0).tolist(),
    'std': x.std(0).tolist(),
    'min': x.min(0).tolist(),
    'max': x.max(0).tolist(),
    'q01': low.tolist(),
    'q99': high.tolist(),
  }


@functools.cache
def _relative(
  folder: str,
  action: str,
  state: str | None,
  relative: relative_lib.RelativeActions,
  chunk: int,
) -> dict[str, list] | None:
  """Statistics of all actions of all chunks; None if all are absolute.

  As in openpi, these include the last action of an episode, repeated.
  """
  data = folders.read(folder)
  mask_A = chunks.relative_mask(data, action, state, relative)
  if mask_A is None:
    return None
  moves = [
    chunks.of_episode(columns, action, state, mask_A, chunk)[1]
    for columns in data.read_numbers(data.episodes, [action, state])
  ]
  x = np.concatenate(moves).reshape(-1, len(mask_A))
  # One number at a time: all of them in float64 may be gigabytes.
  columns = [_of(x[:, [i]].astype(np.float64)) for i in range(x.shape[1])]
  found = {k: [y for one in columns for y in one[k]] for k in columns[0]}
  return found | {'relative': mask_A.tolist()}


def openpi(
  folder: str,
  *,
  action: str = base.ACTION,
  state: str | None = base.STATE,
  relative_actions: relative_lib.RelativeActions = False,
  chunk: ranges.PositiveInt = 50,
  action_normalization_mask: tuple[bool, ...] | None = None,
) -> dict[str, Any]:
  """The same statistics as norm_stats.json of π0 and π0.5 has them.

  Args:
    folder: as for `norm_stats`, like the two others, and errors.
    action: name of the feature with actions.
    state: name of the feature with the robot's state; None for none.
    relative_actions: which numbers of actions are relative to the state when
      their chunk is decided, see `relative_actions.mask`.
    chunk: actions of a chunk, over all of which relative ones are taken.
    action_normalization_mask: as for `norm_stats`. The file has no place for
      it: a number that stays as it is has a mean of 0, a standard deviation of
      1, and quantiles of −1 and 1.

  Returns:
    The statistics; relative actions have 'relative' beside them, the mask.

  Raises:
    ValueError: if the state has no number that actions are relative to.
  """
  (entry,) = norm_stats(
    folder,
    action=action,
    state=state,
    action_normalization_mask=action_normalization_mask,
  ).values()
  mask = entry['action']['mask']
  if relative_actions:
    found = _relative(folder, action, state, relative_actions, chunk)
    entry = entry | ({'action': found} if found else {})
  names = {'actions': 'action', 'state': 'proprio'}
  found = {
    ours: {x: entry[theirs][x] for x in AS_IT_IS}
    for ours, theirs in names.items()
    if theirs in entry
  }
  for name, unit in AS_IT_IS.items():
    found['actions'][name] = [
      x if is_normalized else unit
      for x, is_normalized in zip(found['actions'][name], mask, strict=True)
    ]
  if 'relative' in entry['action']:
    found['actions']['relative'] = entry['action']['relative']
  return found
