"""Writing episodes as LeRobot folders: whole, or not at all."""

import os

import jax
import numpy as np
import pytest

import lerobot_folder
from lerobot_folder import TOP
from rlinf_jax.data.episodes import folders
from rlinf_jax.data.lerobot import write

pytest.importorskip('pyarrow', reason='LeRobot folders are parquet files.')
pytest.importorskip('av', reason='LeRobot folders are videos.')


@pytest.mark.parametrize('codec', ['libsvtav1', 'libx264'])
def test_pictures_come_back_at_their_steps(tmp_path, codec):
  folder = lerobot_folder.make(tmp_path / 'data', codec)
  data = folders.read(folder)
  assert data.cameras == (lerobot_folder.TOP, lerobot_folder.WRIST)
  assert [x.length for x in data.episodes] == [*lerobot_folder.LENGTHS]
  for episode in data.episodes:
    written = lerobot_folder.episode(episode.index)
    for camera in data.cameras:
      got = data.read_pictures(episode, camera).astype(int)
      # A video has other colors than red, green and blue: ±1 grey level.
      assert np.abs(got - written.images[camera]).max() <= 1


def test_an_encoder_leaves_the_scheduling_of_its_caller(tmp_path):
  before = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
  lerobot_folder.make(tmp_path / 'written', 'libsvtav1')
  after = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
  assert before == after


@pytest.mark.parametrize(
  ('change', 'settings', 'message'),
  [
    (lambda x: x[:, :-1], {'codec': 'libx264'}, '47 x 64, and libx264 .* even'),
    (lambda x: x[..., :1], {}, r'\[48, 64, 1\], expected .* three colors'),
    (
      lambda x: x,
      {'codec': 'mjpeg'},
      "no codec 'mjpeg': give one of libsvtav1",
    ),
  ],
)
def test_what_cannot_be_encoded_is_refused_before_it_is_written(
  tmp_path, change, settings, message
):
  x = lerobot_folder.episode(0)
  images = {name: change(y) for name, y in x.images.items()}
  with pytest.raises(ValueError, match=message):
    write.write(
      tmp_path / 'data', [x._replace(images=images)], fps=10, **settings
    )
  other = x._replace(images={lerobot_folder.TOP: x.images[lerobot_folder.TOP]})
  with pytest.raises(ValueError, match='Episode 1 has .* the same cameras'):
    write.write(tmp_path / 'data', [x, other], fps=10)
  assert not any(tmp_path.iterdir())


STEPS = [
  (lambda x: x._replace(action=x.action[:-1]), 'Episode 1 has 8 actions, 9 s'),
  (lambda x: x._replace(state=x.state[:-1]), 'Episode 1 has 9 actions, 8 stat'),
  (
    lambda x: x._replace(images=x.images | {'top': x.images['top'][:-1]}),
    'Episode 1 has 9 actions, 9 states, 8 pictures of top: give one of each',
  ),
  (lambda x: jax.tree.map(lambda y: y[:0], x._replace(task=x.action)), '0 act'),
  (
    lambda x: x._replace(action=x.action[:, :1]),
    r'Episode 1 has actions and states of \(\(1,\), \(2,\)\), and episode 0',
  ),
]


@pytest.mark.parametrize(('change', 'message'), STEPS)
def test_steps_that_lack_something_are_refused(tmp_path, change, message):
  """A picture too few would be taken from the next episode."""
  episodes = [lerobot_folder.episode(i) for i in range(2)]
  episodes = [x._replace(images={'top': x.images[TOP]}) for x in episodes]
  with pytest.raises(ValueError, match=message):
    write.write(tmp_path / 'data', [episodes[0], change(episodes[1])], fps=10)
  with pytest.raises(ValueError, match='0 steps a second and 50 episodes'):
    write.write(tmp_path / 'data', episodes, fps=0)
  assert not any(tmp_path.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path, monkeypatch):
  def full(*args):
    raise OSError('No space left on device')

  with monkeypatch.context() as patched:
    patched.setattr(write, '_write_tasks', full)
    with pytest.raises(OSError, match='No space'):
      lerobot_folder.make(tmp_path / 'data', 'libx264')
  assert not any(tmp_path.iterdir())
  (tmp_path / 'data.part').mkdir()  # Of a program that was ended.
  lerobot_folder.make(tmp_path / 'data', 'libx264')
  assert [x.name for x in tmp_path.iterdir()] == ['data']


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
  with pytest.raises(FileExistsError):
    lerobot_folder.make(tmp_path)
