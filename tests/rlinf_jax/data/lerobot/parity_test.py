"""Folders that LeRobot itself writes, and ours as LeRobot reads them."""

import json

import numpy as np
import pytest

import lerobot_folder
import lerobot_own
from rlinf_jax.data.episodes import folders

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not lerobot_own.HAS_LEROBOT, reason=lerobot_own.REASON),
]


@pytest.mark.parametrize('kind', ['video', 'image'])
def test_what_lerobot_writes_is_read(tmp_path, kind):
  lerobot_own.run('write', tmp_path / 'data', kind)
  data = folders.read(str(tmp_path / 'data'))
  assert data.cameras == (lerobot_own.TOP,)
  assert [x.length for x in data.episodes] == [*lerobot_own.LENGTHS]
  names = ['action', 'observation.state', 'task_index']
  found = data.read_numbers(data.episodes, names)
  for episode, numbers in zip(data.episodes, found, strict=True):
    shown = data.read_pictures(episode, lerobot_own.TOP).astype(int)
    for t in range(episode.length):
      want = lerobot_own.frame(episode.index, t)
      for name in names[:2]:
        np.testing.assert_array_equal(numbers[name][t], want[name])
      assert data.tasks[int(numbers['task_index'][t])] == want['task']
      # A video has other colors than red, green and blue: ±1 grey level.
      most = 1 if kind == 'video' else 0
      assert np.abs(shown[t] - want[lerobot_own.TOP].astype(int)).max() <= most


def test_lerobot_reads_what_is_written(tmp_path):
  folder = lerobot_folder.make(tmp_path / 'ours')
  found = json.loads(lerobot_own.run('read', folder).splitlines()[-1])
  want = [
    {'task': x.task, 'action': action.tolist(), 'episode': i}
    for i in range(len(lerobot_folder.LENGTHS))
    for x in [lerobot_folder.episode(i)]
    for action in x.action
  ]
  assert found['rows'] == want
  data = folders.read(folder)
  own = [
    [str(path.relative_to(folder)), second]
    for x in data.episodes
    for path, second in (x.videos[camera] for camera in data.cameras)
  ]
  assert found['videos'] == own
