"""LeRobot folders that lack something, or say what cannot be, are refused."""

import json
import pathlib
import shutil

import pytest

import lerobot_folder
from rlinf_jax.data.episodes import folders, source, statistics
from rlinf_jax.data.lerobot import layout, pictures, places, version_3, write
from tests.rlinf_jax.data.episodes import source_test

folder = source_test.folder  # The fixture.


@pytest.fixture
def copied(folder, tmp_path):
  """A copy of the folder that a test may damage."""
  path = tmp_path / 'damaged'
  shutil.copytree(folder, path)
  return path


def change(root: pathlib.Path, **changed):
  path = root / places.INFO
  raw = json.loads(path.read_text())
  path.write_text(json.dumps(raw | changed))


def test_another_version_is_refused(copied):
  change(copied, codebase_version='v4.0')
  with pytest.raises(ValueError, match="of version 'v4.0' .*convert it"):
    source_test.make(str(copied))


def test_a_folder_without_meta_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match='There is no .*info.json'):
    source_test.make(str(tmp_path))


def test_a_path_out_of_the_folder_is_refused(copied):
  change(copied, data_path='../{chunk_index}-{file_index}.parquet')
  with pytest.raises(ValueError, match='outside of the folder'):
    source_test.make(str(copied))
  folders.read.cache_clear()
  change(copied, data_path='data/{episode_chunk}.parquet')
  with pytest.raises(ValueError, match='episode_chunk.*has no meaning here'):
    source_test.make(str(copied))


def test_pictures_of_another_size_are_refused(copied):
  raw = json.loads((copied / places.INFO).read_text())
  raw['features'][lerobot_folder.TOP]['shape'] = [3, 96, 128]
  change(copied, features=raw['features'])
  made = source_test.make(str(copied))
  with pytest.raises(
    ValueError, match=r'of \[48, 64, 3\] in episode .*of \[96, 128, 3\]'
  ):
    made.next(made.init(0), {})


@pytest.mark.parametrize(
  ('part', 'error', 'message'),
  [
    ('videos', FileNotFoundError, 'There is no .*mp4: copy the folder'),
    (
      'data',
      FileNotFoundError,
      'There is no .*parquet: copy the folder',
    ),
    ('meta/tasks.parquet', FileNotFoundError, 'which has the instructions'),
    ('meta/episodes', FileNotFoundError, 'no episodes in .*finalize'),
  ],
)
def test_a_folder_that_was_copied_in_part_is_refused(
  copied, part, error, message
):
  path = copied / part
  path.unlink() if path.is_file() else shutil.rmtree(path)
  with pytest.raises(error, match=message):
    made = source_test.make(str(copied))
    made.next(made.init(0), {})


def test_files_that_are_damaged_are_refused(copied):
  for video in copied.glob('videos/*/*/*.mp4'):
    video.write_bytes(video.read_bytes()[:200])
  made = source_test.make(str(copied))
  with pytest.raises(ValueError, match='no video that can be decoded'):
    made.next(made.init(0), {})
  folders.read.cache_clear()
  statistics.norm_stats.cache_clear()
  for table in copied.glob('data/*/*.parquet'):
    table.write_bytes(b'PAR1')
  with pytest.raises(ValueError, match='not a parquet file that can be read'):
    statistics.norm_stats(str(copied))


def test_a_step_without_a_picture_is_named(copied, folder):
  # A video of fewer frames than the episode has steps.
  data = layout.read(folder)
  last = data.episodes[-1]
  longer = last._replace(length=source_test.LENGTHS[-1] + 2)
  with pytest.raises(ValueError, match='Step 5 of episode 4 .* has no picture'):
    pictures.read(data, longer, lerobot_folder.TOP)


def test_an_episode_without_steps_in_its_file_is_named(copied):
  data = layout.read(str(copied))
  for path in {x.numbers for x in data.episodes}:
    source_test.parquet.write_table(
      source_test.parquet.read_table(path).slice(0, 0), path
    )
  with pytest.raises(ValueError, match='Episode 0 .* has 0 steps in .* and 6'):
    layout.numbers(data, data.episodes[:1], ['action'])


def test_an_episode_of_no_steps_is_named(copied):
  (path,) = (copied / version_3.EPISODES).glob('*/*.parquet')
  rows = source_test.parquet.read_table(path).to_pylist()
  rows[1]['length'] = 0
  table = source_test.pyarrow.Table.from_pylist(rows)
  source_test.parquet.write_table(table, path)
  with pytest.raises(ValueError, match='Row 1 of .* episode 1 has 0 steps'):
    layout.read(str(copied))


@pytest.mark.parametrize(
  'described',
  [
    {'shape': [8, 8, 1]},
    {'shape': [8, 8]},
    {'shape': [8, 8, 3], 'info': {'video.is_depth_map': True}},
    {'shape': [8, 8, 3], 'video_info': {'video.is_depth_map': True}},
    {'shape': [8, 8, 3], 'info': {'is_depth_map': True}},
  ],
)
def test_a_camera_of_depth_is_left_out(copied, described):
  features = json.loads((copied / places.INFO).read_text())['features']
  depth = {'dtype': 'video', 'names': None} | described
  change(copied, features={'observation.images.depth': depth} | features)
  assert source.cameras(str(copied)) == ('image/top', 'image/wrist')
  made = source_test.make(str(copied))
  _, (batch,) = source_test.batches(made, made.init(0), 1)
  assert {*batch.obs['image']} == {'top', 'wrist'}
  with pytest.raises(ValueError, match="no camera 'observation.images.depth'"):
    source_test.make(str(copied), camera_names=['observation.images.depth'])


def test_two_cameras_of_one_path_are_refused(tmp_path):
  x = lerobot_folder.episode(0)
  one, two = x.images.values()
  names = 'observation.images.top', 'observation.top'
  x = x._replace(images=dict(zip(names, (one, two), strict=True)))
  write.write(tmp_path / 'data', [x, x], fps=10, codec='libx264')
  folder = str(tmp_path / 'data')
  for find in source.cameras, source_test.make:
    with pytest.raises(ValueError, match="'.*images.top' and 'obs.* image/top"):
      find(folder)
  assert source.cameras(folder, names=names[1:]) == ('image/top',)
