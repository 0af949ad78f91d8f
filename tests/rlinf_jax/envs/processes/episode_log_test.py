"""Snapshots of environments are compared row by row."""

import numpy as np

from rlinf_jax.envs.processes import episode_log


def test_snapshots_are_compared_by_name_in_whatever_order_names_come():
  """JAX sorts the names of a dict, and simulators do not."""
  rng = np.random.default_rng(0)
  state, image = rng.normal(size=(3, 2)), rng.integers(0, 256, (3, 4, 4, 3))
  seed, action = np.arange(3), rng.normal(size=(3, 5, 1, 2))
  one = episode_log.Snapshot(
    seed, seed, action, {'state': state, 'image': {'front': image}}
  )
  other = one._replace(obs={'image': {'front': image}, 'state': state})
  assert not episode_log.differ(one, other).any()
  changed = image.copy()
  changed[1, 0, 0, 0] += 1
  other = one._replace(obs={'image': {'front': changed}, 'state': state})
  assert episode_log.differ(one, other).tolist() == [False, True, False]
