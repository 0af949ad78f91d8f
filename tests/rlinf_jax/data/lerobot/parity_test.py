"""Folders that LeRobot itself writes, and ours as LeRobot reads them."""

import json
import shutil

import pytest

import lerobot_folder
import lerobot_own
from rlinf_jax.data.episodes import folders
from tests.rlinf_jax.data.lerobot import version_2_test

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not lerobot_own.HAS_LEROBOT, reason=lerobot_own.REASON),
]


@pytest.mark.parametrize('version', [2, 3])
def test_what_lerobot_writes_is_read(tmp_path, version):
  lerobot_own.run('write', tmp_path / 'data', version=version)
  version_2_test.check_frames(str(tmp_path / 'data'))


def test_what_lerobot_converts_gives_the_same_batches(tmp_path):
  old, new = tmp_path / 'old', tmp_path / 'new'
  lerobot_own.run('write', old, version=2)
  shutil.copytree(old, new)
  lerobot_own.run('convert', new)
  version_2_test.check_same(str(old), str(new))


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
  assert found['videos'] == stored(folder)


def stored(folder: str) -> list[list]:
  """Videos of each episode, and the second at which it begins in them."""
  data = folders.read(folder)
  return [
    [str(path.relative_to(folder)), second]
    for x in data.episodes
    for path, second in x.videos.values()
  ]


@pytest.mark.parametrize('version', ['v2.0', 'v2.1'])
def test_version_2_is_read_as_lerobot_does(tmp_path, version):
  folder = tmp_path / 'data'
  shutil.copytree(version_2_test.OWN, folder)
  if version == 'v2.0':
    version_2_test.as_version_2_0(folder)
  found = json.loads(
    lerobot_own.run('read', folder, version=2).splitlines()[-1]
  )
  data, rows = folders.read(str(folder)), []
  names = ['action', 'task_index']
  for x, numbers in zip(
    data.episodes, data.read_numbers(data.episodes, names), strict=True
  ):
    for action, task in zip(*(numbers[name] for name in names), strict=True):
      text = data.tasks[int(task)]
      rows.append({'task': text, 'action': action.tolist(), 'episode': x.index})
  assert found == {'rows': rows, 'videos': stored(str(folder))}
