"""Videos: small files, in which the right pictures follow each other."""

import base64
import re

import numpy as np
from PIL import Image
import pytest

import fake_run
from rlinf_jax.report import report, video

GREEN, RED, GRAY = video.GOOD, video.BAD, video.RUNNING


def film(K=4, F=3, edge=20, noise=False):
  """Frames of episodes: episode k has shade 64 k, and 20 more per frame."""
  shade = 64 * np.arange(K)[:, None] + 20 * np.arange(F)
  frame = np.tile(shade[:, :, None, None, None], (1, 1, edge, edge, 3))
  if noise:
    frame = np.random.default_rng(0).integers(0, 256, frame.shape)
  return {
    'seed': np.arange(K) + 7,
    'time': np.tile(np.arange(F), (K, 1)),
    'success': np.zeros((K, F)),
    'solved': np.zeros(K),
    'shown': np.ones(K),
    'frame': frame.astype(np.uint8),
  }


def test_episodes_are_side_by_side_in_order_and_frames_in_time(tmp_path):
  episodes = film()
  episodes['success'][2, 1:] = episodes['solved'][2] = 1
  at = tmp_path / 'videos' / 'x.gif'
  video.write(at, episodes)
  opened = Image.open(at)
  assert opened.n_frames == 3 and opened.info['loop'] == 0
  wide, high = opened.size[0] // 2, opened.size[1] // 2
  for f in range(3):
    opened.seek(f)
    shown = np.asarray(opened.convert('RGB')).astype(int)
    for k in range(4):
      row, column = divmod(k, 2)
      tile = shown[row * high :, column * wide :][:high, :wide]
      middle = tile[video.STRIP + 13, 13]
      # A palette tells 16 shades of a color apart.
      assert np.abs(middle - (64 * k + 20 * f)).max() <= 8
      edge = GREEN if k == 2 and f >= 1 else RED if f == 2 else GRAY
      assert np.abs(tile[video.STRIP + 13, 1] - edge).max() <= 24


def test_the_seed_of_a_small_picture_does_not_reach_the_number_of_its_step():
  episodes = film(K=1) | {'time': np.array([[0, 60, 120]])}
  names = [
    np.asarray(video.side_by_side(episodes | {'seed': [seed]})[1])
    for seed in (2**30, 2**30 + 999)
  ]
  strips = [name[: video.STRIP] != 255 for name in names]
  # Columns between both texts are empty, and the step is the same.
  (seeds, last), (_, other) = (
    np.split(strip.any((0, 2)), [90]) for strip in strips
  )
  assert seeds[:80].any() and not seeds[-3:].any()
  assert last.any() and (last == other).all()


def test_frames_that_cannot_be_drawn_leave_no_file(tmp_path):
  episodes = film()
  episodes['shown'][:] = 0
  video.try_write(tmp_path, 3, episodes, pytest.fail)
  assert not video.paths(tmp_path)
  messages = []
  video.try_write(
    tmp_path, 3, episodes | {'shown': np.ones(9)}, messages.append
  )
  assert not video.paths(tmp_path) and 'no video of step 3' in messages[0]


def test_a_video_is_small_for_any_frames(tmp_path):
  video.try_write(tmp_path, 0, film(F=12, edge=100, noise=True), pytest.fail)
  (path,) = video.paths(tmp_path).values()
  assert path.stat().st_size <= video.MAX_BYTES
  assert 1 < Image.open(path).n_frames < 12  # Fewer, but the last.


def test_videos_of_repeated_steps_are_removed(tmp_path):
  for step in (0, 20, 1_000_040):
    video.try_write(tmp_path, step, film(K=1), pytest.fail)
  assert list(video.paths(tmp_path)) == [0, 20, 1_000_040]
  video.truncate(tmp_path, 20)
  assert list(video.paths(tmp_path)) == [0, 20]
  video.truncate(tmp_path, -1)
  assert not video.paths(tmp_path)


def test_a_report_shows_the_first_a_middle_and_the_last_video(tmp_path):
  folder = fake_run.make_run(tmp_path / 'sums')
  for step in range(0, 50, 10):
    video.try_write(folder, step, film(F=2 + step // 10), pytest.fail)
  page = report.write(folder).read_text(encoding='utf-8')
  inside = re.findall(r'data:image/gif;base64,([^"]+)', page)
  paths = video.paths(folder)
  want = [paths[step].read_bytes() for step in (0, 20, 40)]
  assert [base64.b64decode(x) for x in inside] == want
  assert re.findall(r'After step (\d+)</h3><span class="value">', page) == [
    '0',
    '20',
    '40',
  ]
