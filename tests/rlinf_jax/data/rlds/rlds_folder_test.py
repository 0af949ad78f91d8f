"""An RLDS data set that tensorflow_datasets 4.9.10 wrote, read without it.

`tests/fixtures/tiny_push` has five episodes in two files, and what TensorFlow
2.21 reads from them in want.npz.
"""

import json
import pathlib
import shutil
import struct

import numpy as np
import pytest

import lerobot_folder
from rlinf_jax.data.episodes import folders, source, statistics
from rlinf_jax.data.rlds import extra
from stages import base
from stages.vla.openvla import action_tokens

pytest.importorskip('google_crc32c', reason='Checksums of TFRecord files.')

OWN = pathlib.Path(__file__).parents[3] / 'fixtures/tiny_push'
SHARD = 'tiny_push-train.tfrecord-00000-of-00002'
CAMERA, WRIST = 'observation.image', 'observation.wrist_image'


@pytest.fixture(scope='module')
def want():
  return np.load(OWN / 'want.npz')


def copy(tmp_path) -> pathlib.Path:
  folder = tmp_path / '1.0.0'
  shutil.copytree(OWN, folder)
  return folder


def edit(path: pathlib.Path, change):
  raw = json.loads(path.read_text())
  change(raw)
  path.write_text(json.dumps(raw))


def test_episodes_are_those_that_tensorflow_reads(want):
  data = folders.read(str(OWN))
  assert [x.length for x in data.episodes] == [7, 3, 6, 4, 5]
  assert data.cameras == (CAMERA, WRIST)
  names = ['action', 'observation.state', 'is_last', 'task_index']
  for i, x in enumerate(data.episodes):
    (found,) = data.read_numbers([x], names)
    np.testing.assert_array_equal(found['action'], want[f'{i}/action'])
    np.testing.assert_array_equal(
      found['observation.state'], want[f'{i}/state']
    )
    np.testing.assert_array_equal(found['is_last'][:, 0], want[f'{i}/last'])
    texts = [data.tasks[task] for task in found['task_index'].tolist()]
    assert texts == want[f'{i}/text'].tolist()
    np.testing.assert_array_equal(
      data.read_pictures(x, WRIST), want[f'{i}/wrist']
    )
    # JPEG leaves open how colors are interpolated and cosines are rounded.
    image = data.read_pictures(x, CAMERA).astype(int)
    assert np.abs(image - want[f'{i}/image']).max() <= 6


def test_a_source_gives_steps_with_the_actions_after_them(want):
  stats = statistics.norm_stats(str(OWN))
  made = source.source(
    str(OWN),
    batch_size=4,
    instructions=lerobot_folder.numbered,
    normalize=action_tokens.normalizer(stats),
    chunk=2,
    window_rows=8,
  )
  (entry,) = stats.values()
  low, high = (np.array(entry['action'][name]) for name in ('q01', 'q99'))
  state, seen = made.init(0), set()
  for _ in range(5):  # The 20 steps of all episodes but the last.
    state, batch = made.next(state, {})
    for b in range(4):
      ((i, t),) = [
        (i, t)
        for i in range(4)
        for t in range(len(want[f'{i}/state']))
        if (want[f'{i}/state'][t] == batch.obs['state'][b]).all()
      ]
      seen.add((i, t))
      moves = want[f'{i}/action']
      moves = moves[np.minimum([t, t + 1], len(moves) - 1)]
      moves = np.clip(2 * (moves - low) / (high - low) - 1, -1, 1)
      np.testing.assert_allclose(batch.action[b], moves, atol=1e-5)
      np.testing.assert_array_equal(
        batch.obs['image']['wrist_image'][b], want[f'{i}/wrist'][t]
      )
      task = folders.read(str(OWN)).tasks[batch.obs[base.PROMPT]['token'][b, 0]]
      assert task == want[f'{i}/text'][t]
  assert len(seen) == 20
  assert source.cameras(str(OWN)) == ('image/image', 'image/wrist_image')


def make(folder, **settings):
  return source.source(
    str(folder),
    batch_size=4,
    instructions=lerobot_folder.numbered,
    normalize=lambda x: x,
    chunk=1,
    **settings,
  )


def test_a_split_is_held_out_that_is_not_trained_on(tmp_path, want):
  folder = copy(tmp_path)
  # Two episodes of the split 'train' are also the split 'val'.
  val = folder / SHARD.replace('train', 'val').replace('00002', '00001')
  shutil.copy(folder / SHARD, val)
  shards = lambda x: x['splits'][1].update(shardLengths=['2'])
  edit(folder / 'dataset_info.json', shards)
  made = make(folder, held_out_split='val')
  states = np.concatenate([x.obs['state'] for x in made.held_out()])
  np.testing.assert_array_equal(states, want['1/state'])
  state, rows = made.init(0), []
  for _ in range(25):  # Four epochs of the 25 steps of all five episodes.
    state, batch = made.next(state, {})
    rows += batch.obs['state'].tolist()
  assert len({*map(tuple, rows)}) == 25
  (batch,) = make(folder, held_out_split='train').held_out()
  np.testing.assert_array_equal(batch.obs['state'], want['4/state'])
  make(folder, held_out_split='val').check(state)
  folders.read.cache_clear()
  shutil.copy(folder / SHARD.replace('00000-', '00001-'), val)
  with pytest.raises(ValueError, match='be evaluated on other rows'):
    make(folder, held_out_split='val').check(state)
  with pytest.raises(ValueError, match="a split 'test'; it has .*train, val"):
    make(folder, held_out_split='test')


@pytest.mark.parametrize('at', [0, 9, 40, -60, -2])
def test_a_damaged_byte_is_found(tmp_path, at):
  path = copy(tmp_path) / SHARD
  content = bytearray(path.read_bytes())
  content[at] ^= 1
  path.write_bytes(content)
  with pytest.raises(ValueError, match='damaged'):
    folders.read(str(path.parent))


@pytest.mark.parametrize('size', [5, 11, 3000, -1])
def test_a_file_that_was_cut_off_is_found(tmp_path, size):
  path = copy(tmp_path) / SHARD
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match='ends within a record'):
    folders.read(str(path.parent))


def test_a_record_of_something_else_is_refused(tmp_path):
  path, content = copy(tmp_path) / SHARD, b'no message'
  size = struct.pack('<Q', len(content))
  parts = [
    part + struct.pack('<I', extra.checksum(part)) for part in (size, content)
  ]
  path.write_bytes(b''.join(parts))
  with pytest.raises(ValueError, match='is no tf.train.Example'):
    folders.read(str(path.parent))


def test_a_missing_file_is_named(tmp_path):
  folder = copy(tmp_path)
  (folder / SHARD).unlink()
  with pytest.raises(FileNotFoundError, match=f'There is no .*{SHARD}'):
    folders.read(str(folder))


def test_statistics_are_named_after_the_data_set(tmp_path):
  folder = copy(tmp_path)
  assert folder.name == '1.0.0'
  assert [*statistics.norm_stats(str(folder))] == ['tiny_push']


def test_a_folder_of_versions_is_refused_with_the_newest(tmp_path):
  copy(tmp_path)
  with pytest.raises(FileNotFoundError, match=r'of one, such as .*/1\.0\.0'):
    folders.read(str(tmp_path))


WRONG = {
  'files of the format .*riegeli': (
    'dataset_info.json',
    lambda x: x.update(fileFormat='riegeli'),
  ),
  "does not name the files of a split 'train'; it has the splits val": (
    'dataset_info.json',
    lambda x: x.update(splits=x['splits'][1:]),
  ),
  'names ../x, outside of the folder': (
    'dataset_info.json',
    lambda x: x['splits'][0].update(filepathTemplate='../x'),
  ),
  "has no 'steps' of episodes": (
    'features.json',
    lambda x: x['featuresDict']['features'].pop('steps'),
  ),
  'one named language_instruction is expected': (
    'features.json',
    lambda x: steps(x).pop('language_instruction'),
  ),
  "14 values of 'steps/action', and 21 are expected": (
    'features.json',
    lambda x: steps(x)['action']['tensor']['shape'].update(dimensions=['3']),
  ),
}


def steps(x):
  found = x['featuresDict']['features']['steps']['sequence']['feature']
  return found['featuresDict']['features']


@pytest.mark.parametrize('said', WRONG)
def test_a_wrong_description_is_refused(tmp_path, said):
  folder = copy(tmp_path)
  file, change = WRONG[said]
  edit(folder / file, change)
  with pytest.raises(ValueError, match=said):
    folders.read(str(folder))


def test_a_picture_of_another_size_is_refused(tmp_path):
  folder = copy(tmp_path)

  def wider(x):
    image = steps(x)['observation']['featuresDict']['features']['image']
    image['image']['shape']['dimensions'] = ['16', '20', '3']

  edit(folder / 'features.json', wider)
  data = folders.read(str(folder))
  with pytest.raises(ValueError, match=r'is of \[16, 16, 3\], and of \[16, 20'):
    data.read_pictures(data.episodes[0], CAMERA)


def test_a_feature_that_is_not_there_is_refused_with_those_that_are():
  with pytest.raises(ValueError, match=f'but `{CAMERA}`, `{WRIST}`: name one'):
    source.cameras(str(OWN), names=('observation.images.top',))
