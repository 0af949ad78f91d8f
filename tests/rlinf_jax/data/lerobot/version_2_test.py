"""Folders of version 2, against those that LeRobot converts them to.

LeRobot 0.3.3 wrote `tests/fixtures/lerobot_v21`, five episodes of
`lerobot_own.frame` in folders of two, by `lerobot_own.write`. LeRobot 0.4.4
converted it to `lerobot_v30`, by `lerobot_own.convert`.
"""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import lerobot_folder
import lerobot_own
from rlinf_jax.data.episodes import folders, source, statistics
from rlinf_jax.data.lerobot import (
  extra,
  layout,
  pictures,
  places,
  version_2,
  version_3,
)
from stages import base

pytest.importorskip('pyarrow', reason='LeRobot folders are parquet files.')
pytest.importorskip('av', reason='LeRobot folders are videos.')

OWN = pathlib.Path(__file__).parents[3] / 'fixtures/lerobot_v21'
CONVERTED = OWN.parent / 'lerobot_v30'
NAMES = ['action', 'observation.state', 'task_index']


@pytest.fixture
def copied(tmp_path):
  """A copy of the folder that a test may change."""
  shutil.copytree(OWN, tmp_path / 'data')
  return tmp_path / 'data'


def make(folder: str) -> base.Source:
  return source.source(
    folder,
    batch_size=4,
    instructions=lerobot_folder.numbered,
    normalize=lambda x: x,
    chunk=3,
    window_rows=12,
  )


def check_frames(folder: str):
  """Checks that a folder has the steps of `lerobot_own.frame`."""
  data = folders.read(folder)
  assert {*data.cameras} == {*lerobot_own.KINDS}
  assert [x.length for x in data.episodes] == [*lerobot_own.LENGTHS]
  found = data.read_numbers(data.episodes, NAMES)
  for episode, numbers in zip(data.episodes, found, strict=True):
    shown = {x: data.read_pictures(episode, x) for x in data.cameras}
    for t in range(episode.length):
      want = lerobot_own.frame(episode.index, t)
      for name in NAMES[:2]:
        np.testing.assert_array_equal(numbers[name][t], want[name])
      assert data.tasks[int(numbers['task_index'][t])] == want['task']
      for camera, kind in lerobot_own.KINDS.items():
        # A video has other colors than red, green and blue: ±1 grey level.
        most = 1 if kind == 'video' else 0
        error = shown[camera][t].astype(int) - want[camera]
        assert np.abs(error).max() <= most


def check_same(one: str, other: str):
  """Checks that two folders give the same batches and statistics."""
  made = [make(folder) for folder in (one, other)]
  states = [x.init(0) for x in made]
  for _ in range(12):  # Two epochs.
    found = [x.next(now, {}) for x, now in zip(made, states, strict=True)]
    states = [state for state, _ in found]
    check_equal(*(batch for _, batch in found))
  check_equal(*(x.held_out() for x in made))
  stats = [statistics.norm_stats(x, name='it') for x in (one, other)]
  assert stats[0] == stats[1]


def check_equal(one, other):
  """Checks that two trees have the same bytes."""
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert x.tobytes() == y.tobytes()


def as_version_2_0(folder: pathlib.Path):
  """Makes a folder one of version 2.0, which has statistics of all episodes."""
  change(folder, codebase_version='v2.0')
  (folder / 'meta/episodes_stats.jsonl').unlink()
  shutil.copy(CONVERTED / 'meta/stats.json', folder / 'meta/stats.json')


def change(folder: pathlib.Path, **changed):
  path = folder / places.INFO
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize('folder', [OWN, CONVERTED])
def test_steps_are_those_that_were_given_to_lerobot(folder):
  check_frames(str(folder))


def test_batches_are_those_of_the_converted_folder():
  check_same(str(OWN), str(CONVERTED))


def test_version_2_0_is_read_as_2_1(copied):
  as_version_2_0(copied)
  check_same(str(copied), str(OWN))


def test_a_run_goes_on_with_the_same_episodes_alone(copied):
  made = make(str(OWN))
  state, _ = made.next(made.init(0), {})
  make(str(copied)).check(state)
  check_equal(made.next(state, {})[1], make(str(copied)).next(state, {})[1])
  folders.read.cache_clear()
  tasks = copied / version_2.TASKS
  tasks.write_text(tasks.read_text().replace('task 1', 'task one'))
  with pytest.raises(ValueError, match='data changed since the run was begun'):
    make(str(copied)).check(state)


def test_episodes_may_be_left_out(copied):
  path = copied / version_2.EPISODES
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([lines[4], '', lines[1]]))
  change(copied, total_episodes=2)
  data = folders.read(str(copied))
  assert [x.index for x in data.episodes] == [1, 4]
  found = data.read_numbers(data.episodes, ['action'])
  assert [x['action'][0, 1] for x in found] == [1, 4]


@pytest.mark.parametrize('kept', [OWN, CONVERTED])
def test_a_list_that_was_cut_off_is_refused(kept, tmp_path):
  folder = tmp_path / 'data'
  shutil.copytree(kept, folder)
  if kept == OWN:
    path = folder / version_2.EPISODES
    path.write_text(''.join(path.read_text().splitlines(True)[:3]))
  else:
    (path,) = (folder / version_3.EPISODES).glob('*/*.parquet')
    _, parquet = extra.parquet()
    parquet.write_table(parquet.read_table(path).slice(0, 3), path)
  with pytest.raises(ValueError, match='lists 3 episodes, and .* counts 5: co'):
    layout.read(str(folder))
  change(folder, total_episodes=3)
  assert len(layout.read(str(folder)).episodes) == 3


def test_pictures_are_those_nearest_in_time(monkeypatch):
  """A video may have more frames a second than there are steps."""
  data = layout.read(str(OWN))
  camera, fps = lerobot_own.TOP, 3 * data.fps

  class Frame:
    def __init__(self, n):
      self.n = n

    def to_ndarray(self, format):
      return np.full(lerobot_folder.SHAPE, self.n, np.uint8)

  frames = [(n / fps, Frame(n)) for n in range(12)]
  monkeypatch.setattr(extra, 'decoded', lambda path, start: iter(frames))
  found = pictures.read(data, data.episodes[0], camera)
  assert found[:, 0, 0, 0].tolist() == [0, 3, 6, 9]


def test_a_missing_file_is_named(copied):
  for path in version_2.EPISODES, version_2.TASKS:
    kept = (copied / path).read_bytes()
    (copied / path).unlink()
    with pytest.raises(FileNotFoundError, match=f'There is no .*{path}: copy'):
      layout.read(str(copied))
    (copied / path).write_bytes(kept)
  video = copied / 'videos/chunk-001' / lerobot_own.TOP / 'episode_000003.mp4'
  video.unlink()
  with pytest.raises(FileNotFoundError, match='There is no .*_000003.mp4'):
    make(str(copied))


INFOS = [
  ({'chunks_size': 0}, 'has the chunks_size 0, expected how many episodes'),
  ({'chunks_size': None}, 'has the chunks_size None'),
  ({'video_path': None}, 'has the path None, which has no meaning'),
  ({'data_path': '{episode_index:0999999999d}'}, 'which has no meaning here'),
  ({'data_path': '{episode_index.real}'}, 'which has no meaning here'),
  ({'data_path': 'x\0{episode_index}'}, 'which has no meaning here'),
  ({'data_path': '../{episode_index}'}, 'outside of the folder'),
  ({'codebase_version': 'v1.6'}, "of version 'v1.6' of .* v2 and v3 are read"),
  ({'codebase_version': None}, 'of version None of the format'),
]


@pytest.mark.parametrize(('changed', 'message'), INFOS)
def test_a_wrong_description_is_refused(copied, changed, message):
  change(copied, **changed)
  with pytest.raises(ValueError, match=message):
    layout.read(str(copied))


LINES = [
  (version_2.EPISODES, '{"episode_index": 0, "len', 'line 1 is not JSON'),
  (version_2.EPISODES, '[0, 4]', 'line 1 .*write rows as {"episode_index": 0,'),
  (version_2.EPISODES, '{"length": 4}', 'line 1 has the episode_index None'),
  (
    version_2.EPISODES,
    '{"episode_index": "0", "length": true}',
    "line 1 has the episode_index '0' and the length True: give integers",
  ),
  (
    version_2.EPISODES,
    '{"episode_index": -1, "length": 4}',
    'line 1 has the episode_index -1',
  ),
  (
    version_2.EPISODES,
    '{"episode_index": 0, "length": 0}',
    'line 1 says that episode 0 has 0 steps: leave',
  ),
  (
    version_2.EPISODES,
    '{"episode_index": 0, "length": 4}\n{"episode_index": 0, "length": 4}',
    'line 2 lists episode 0, as an entry before it does',
  ),
  (version_2.EPISODES, b'\xff', 'is not text in UTF-8 .* at byte 0'),
  (version_2.EPISODES, '', 'lists no episodes'),
  (
    version_2.TASKS,
    '{"task_index": 0, "task": "lift"}\n{"task_index": 0, "task": "push"}',
    "line 2 has the task 'push' of the task_index 0, which is that of 'lift'",
  ),
  (
    version_2.TASKS,
    '{"task_index": 0, "task": ["task 0"]}',
    r"line 1 has the task \['task 0'\] of the task_index 0",
  ),
]


@pytest.mark.parametrize(('file', 'content', 'message'), LINES)
def test_a_wrong_list_is_refused(copied, file, content, message):
  content = content if isinstance(content, bytes) else content.encode()
  (copied / file).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    layout.read(str(copied))
