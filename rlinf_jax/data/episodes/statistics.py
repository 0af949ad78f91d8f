"""Statistics of episodes on disk, in the form that OpenVLA's models store.

Quantiles are those of all steps. LeRobot's meta/stats.json is not used: its are
means of the quantiles of single episodes.
"""

import functools
from typing import Any

import numpy as np

from rlinf_jax.data.episode_files import base
from rlinf_jax.data.episodes import folders


@functools.cache
def norm_stats(
  folder: str,
  *,
  name: str | None = None,
  action: str = base.ACTION,
  state: str | None = base.STATE,
) -> dict[str, Any]:
  """Statistics by data set, as dataset_statistics.json has them.

  Args:
    folder: a folder that `folders.read` reads.
    name: of the data set; if None, that of dataset_info.json in RLDS, and that
      of the folder in LeRobot's format.
    action: name of the feature with actions.
    state: name of the feature with the robot's state; None for none.

  Raises:
    ValueError: if the folder has no such features.
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
    low, high = np.quantile(x, [0.01, 0.99], axis=0)
    entry[part] = {
      'mean': x.mean(0).tolist(),
      'std': x.std(0).tolist(),
      'min': x.min(0).tolist(),
      'max': x.max(0).tolist(),
      'q01': low.tolist(),
      'q99': high.tolist(),
      'mask': [True] * x.shape[1],
    }
  entry['num_transitions'] = sum(x.length for x in data.episodes)
  entry['num_trajectories'] = len(data.episodes)
  return {name or data.name: entry}


def openpi(
  folder: str, *, action: str = base.ACTION, state: str | None = base.STATE
) -> dict[str, Any]:
  """The same statistics as norm_stats.json of π0 and π0.5 has them.

  Arguments and errors are those of `norm_stats`.
  """
  (entry,) = norm_stats(folder, action=action, state=state).values()
  names = {'actions': 'action', 'state': 'proprio'}
  return {
    ours: {x: entry[theirs][x] for x in ('mean', 'std', 'q01', 'q99')}
    for ours, theirs in names.items()
    if theirs in entry
  }
