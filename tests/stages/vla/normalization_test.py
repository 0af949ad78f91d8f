"""Statistics of states and actions, as openpi computes and stores them."""

import json

import numpy as np
import pytest

from stages.models.files import weights
from stages.vla import lerobot_processors, normalization

STATS = {
  part: {
    'mean': [0.5, -2.0],
    'std': [0.25, 0.0],
    'q01': [-1.0, 3.0],
    'q99': [3.0, 3.0],
  }
  for part in ('state', 'actions')
}
X = np.array([[0.0, 3.0], [4.0, -2.0], [3.0, 1.0]], np.float32)


def test_pi0_reads_standard_scores():
  own = normalization.of(STATS, 'state', quantiles=False)
  mean, std = np.array([0.5, -2.0]), np.array([0.25, 0.0])
  np.testing.assert_allclose(
    own.normalize(X), (X - mean) / (std + 1e-6), rtol=1e-5
  )
  np.testing.assert_allclose(own.unnormalize(own.normalize(X)), X, atol=1e-5)


def test_pi05_reads_numbers_between_quantiles_unclipped():
  own = normalization.of(STATS, 'actions', quantiles=True)
  low, high = np.array([-1.0, 3.0]), np.array([3.0, 3.0])
  want = (X - low) / (high - low + 1e-6) * 2.0 - 1.0
  np.testing.assert_allclose(own.normalize(X), want, rtol=1e-5)
  # The second number never changes in the data, where it becomes −1.
  assert own.normalize(X)[1, 0] > 1.4 and own.normalize(X)[0, 1] == -1.0
  np.testing.assert_allclose(own.unnormalize(own.normalize(X)), X, atol=1e-5)


def test_the_file_of_a_checkpoint_is_that_of_openpi(tmp_path):
  normalization.write(tmp_path, 'physical-intelligence/libero', STATS)
  path = tmp_path / 'assets/physical-intelligence/libero/norm_stats.json'
  assert json.loads(path.read_text()) == {'norm_stats': STATS}
  assert normalization.read(tmp_path) == STATS
  with pytest.raises(weights.CheckpointError, match="no statistics of 'droid'"):
    normalization.read(tmp_path, 'droid')
  normalization.write(tmp_path, 'droid', {'state': STATS['state']})
  with pytest.raises(weights.CheckpointError, match='droid, phys.*name one of'):
    normalization.read(tmp_path)
  with pytest.raises(ValueError, match="'q01' and 'q99' of 'actions'"):
    normalization.of(
      normalization.read(tmp_path, 'droid'), 'actions', quantiles=True
    )


def test_a_folder_without_statistics_is_refused(tmp_path):
  with pytest.raises(weights.CheckpointError, match='statistics of none'):
    normalization.read(tmp_path)
  path = tmp_path / 'assets/a/norm_stats.json'
  path.parent.mkdir(parents=True)
  path.write_text('[]')
  with pytest.raises(weights.CheckpointError, match="object with 'norm_stats'"):
    normalization.read(tmp_path)


def test_a_checkpoint_tells_which_actions_are_relative_or_nothing(tmp_path):
  assert normalization.relative(None) == ()
  assert normalization.relative(str(tmp_path)) == ()
  normalization.write(tmp_path, 'robot', STATS)
  assert normalization.relative(str(tmp_path)) == ()
  mask = {'relative': [True, False]}
  stats = STATS | {'actions': STATS['actions'] | mask}
  normalization.write(tmp_path, 'robot', stats)
  assert normalization.relative(str(tmp_path)) == (True, False)
  # Of several robots, nothing tells which one is meant.
  normalization.write(tmp_path, 'other', stats)
  assert normalization.relative(str(tmp_path)) == ()
  lerobots = tmp_path / 'lerobot'
  lerobots.mkdir()
  lerobot_processors.write(lerobots, stats, adaptive=False)
  assert normalization.relative(str(lerobots)) == (True, False)
