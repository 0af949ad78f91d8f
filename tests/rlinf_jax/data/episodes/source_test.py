"""Demonstrations from LeRobot folders: the right rows, again after a stop."""

import io
import shutil

import jax
import numpy as np
from PIL import Image
import pytest

import lerobot_folder
from rlinf_jax.data.episode_files import base as episodes_base
from rlinf_jax.data.episodes import source, statistics, windows
from rlinf_jax.data.lerobot import extra, layout, pictures, write
from stages import base
from stages.envs import seed_source
from stages.vla import normalization
from stages.vla.openvla import action_tokens

pyarrow = pytest.importorskip(
  'pyarrow', reason='LeRobot folders are parquet files.'
)
parquet = pytest.importorskip('pyarrow.parquet')
pytest.importorskip('av', reason='LeRobot folders are videos.')

LENGTHS = lerobot_folder.LENGTHS


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return lerobot_folder.make(tmp_path_factory.mktemp('lerobot') / 'data')


def make(folder, **settings):
  settings = {'batch_size': 4, 'chunk': 3, 'window_rows': 12} | settings
  return source.source(
    folder,
    instructions=lerobot_folder.numbered,
    **{'normalize': lambda x: x} | settings,
  )


def between_quantiles(folder):
  return action_tokens.normalizer(statistics.norm_stats(folder))


def batches(made, state, count):
  found = []
  for _ in range(count):
    state, batch = made.next(state, {})
    found.append(batch)
  return state, found


def test_a_row_is_a_step_with_the_actions_after_it(folder):
  made = make(folder, normalize=between_quantiles(folder))
  _, found = batches(made, made.init(0), 30)
  stats = statistics.norm_stats(folder)['data']['action']
  low, high = (np.array(stats[name]) for name in ('q01', 'q99'))
  tasks = [*layout.read(folder).tasks.values()]
  for batch in found:
    assert batch.action.shape == (4, 3, 3)
    assert batch.obs['image']['wrist'].dtype == np.uint8
    for b in range(4):
      index, t = batch.obs['state'][b].astype(int)
      written = lerobot_folder.episode(index)
      at = np.minimum(t + np.arange(3), LENGTHS[index] - 1)
      want = np.clip(2 * (written.action[at] - low) / (high - low) - 1, -1, 1)
      np.testing.assert_allclose(batch.action[b], want, atol=1e-5)
      grey = batch.obs['image']['top'][b].astype(int)
      assert np.abs(grey - (30 * index + 3 * t)).max() <= 1
      task = tasks[batch.obs[base.PROMPT]['token'][b, 0]]
      assert task == lerobot_folder.TASKS[index % 2]


def test_an_epoch_has_every_step_of_the_training_episodes_once(folder):
  made = make(folder, batch_size=2)
  state, steps = made.init(3), sum(LENGTHS[:-1])
  orders = []
  for _ in range(2):
    state, found = batches(made, state, steps // 2)
    rows = np.concatenate([x.obs['state'] for x in found]).astype(int)
    orders.append(rows.tolist())
    assert {tuple(x) for x in rows.tolist()} == {
      (i, t) for i in range(len(LENGTHS) - 1) for t in range(LENGTHS[i])
    }
  assert orders[0] != orders[1]


def test_a_source_goes_on_where_it_stopped(folder):
  made = make(folder)
  state, _ = batches(made, made.init(5), 4)
  _, want = batches(made, state, 9)
  _, got = batches(make(folder), state, 9)
  jax.tree.map(np.testing.assert_array_equal, want, got)
  _, other = batches(make(folder), make(folder).init(6), 9)
  assert any(
    (a.action != b.action).any() for a, b in zip(want, other, strict=True)
  )


def test_a_run_does_not_go_on_with_other_episodes(folder, tmp_path):
  path = tmp_path / 'data'
  shutil.copytree(folder, path)
  state, _ = batches(make(folder), make(folder).init(5), 1)
  make(str(path)).check(state)  # A copy has the same episodes.
  changed = next(path.glob('videos/*top/*/*.mp4'))
  changed.write_bytes(changed.read_bytes() + b'0')
  with pytest.raises(ValueError, match='data changed since the run was begun'):
    make(str(path)).check(state)
  seen = {'camera_names': ['observation.images.wrist']}
  make(str(path), **seen).check(make(folder, **seen).init(5))


def test_held_out_steps_are_of_other_episodes(folder):
  made = make(folder, held_out_episodes=2, held_out_batch=5)
  held_out = made.held_out()
  rows = np.concatenate([x.obs['state'] for x in held_out]).astype(int)
  assert len(held_out) == 2 and {*rows[:, 0]} == {3, 4}
  assert len({tuple(x) for x in rows.tolist()}) == 10
  seeds = seed_source.seeds(held_out=4, held_out_batch=2)
  assert len(make(folder, evaluation=seeds).held_out()) == 2


def test_quantiles_are_those_of_all_steps(folder):
  found = statistics.norm_stats(folder, name='mine')['mine']
  actions = [lerobot_folder.episode(i).action for i in range(len(LENGTHS))]
  x = np.concatenate(actions)
  want = np.quantile(x, [0.01, 0.99], axis=0)
  np.testing.assert_allclose(found['action']['q01'], want[0], atol=1e-6)
  np.testing.assert_allclose(found['action']['q99'], want[1], atol=1e-6)
  assert found['action']['mask'] == [True] * 3
  assert len(found['proprio']['q01']) == 2
  assert found['num_transitions'] == sum(LENGTHS)
  other = statistics.openpi(folder)
  assert other['actions']['mean'] == found['action']['mean']
  assert other['state']['q99'] == found['proprio']['q99']
  assert [*statistics.openpi(folder, state=None)] == ['actions']


def test_actions_are_relative_to_the_state_of_their_row(folder):
  relative = (True, True)  # The third number of an action is absolute.
  stats = statistics.openpi(folder, relative_actions=relative, chunk=3)
  chunks = []
  for index, T in enumerate(LENGTHS):
    written = lerobot_folder.episode(index)
    for t in range(T):
      own = written.action[np.minimum(t + np.arange(3), T - 1)]
      chunks.append(own - np.array([index, t, 0]))
  x = np.concatenate(chunks)
  for name, want in (
    ('mean', x.mean(0)),
    ('std', x.std(0)),
    ('q01', np.quantile(x, 0.01, axis=0)),
    ('q99', np.quantile(x, 0.99, axis=0)),
  ):
    np.testing.assert_allclose(stats['actions'][name], want, atol=1e-5)
  assert stats['state'] == statistics.openpi(folder)['state']
  assert stats['actions']['relative'] == [True, True, False]
  normalize = normalization.normalizer(stats, quantiles=False)
  made = make(folder, normalize=normalize, relative_actions=relative)
  _, (batch,) = batches(made, made.init(0), 1)
  want = [
    chunks[sum(LENGTHS[: int(i)]) + int(t)] for i, t in batch.obs['state']
  ]
  got = batch.action * (x.std(0) + 1e-6) + x.mean(0)
  np.testing.assert_allclose(got, want, atol=1e-4)
  with pytest.raises(ValueError, match='has 4 entries, and actions have 3'):
    statistics.openpi(folder, relative_actions=(True,) * 4)
  with pytest.raises(ValueError, match='the state has 0 numbers'):
    statistics.openpi(folder, state=None, relative_actions=True)


def test_a_number_that_is_not_normalized_stays_as_it_is(folder):
  mask = (True, True, False)
  of_openvla = statistics.norm_stats(folder, action_normalization_mask=mask)
  assert of_openvla['data']['action']['mask'] == [*mask]
  assert of_openvla['data']['proprio']['mask'] == [True] * 2
  stats = statistics.openpi(folder, action_normalization_mask=mask)
  for normalize, tolerance in (
    (action_tokens.normalizer(of_openvla), 0.0),
    (normalization.normalizer(stats, quantiles=False), 1e-4),
    (normalization.normalizer(stats, quantiles=True), 1e-4),
  ):
    made = make(folder, normalize=normalize)
    _, (batch,) = batches(made, made.init(0), 1)
    for b in range(4):
      index, t = batch.obs['state'][b].astype(int)
      at = np.minimum(t + np.arange(3), LENGTHS[index] - 1)
      want = lerobot_folder.episode(index).action[at]
      np.testing.assert_allclose(
        batch.action[b, :, 2], want[:, 2], atol=tolerance
      )
      assert np.abs(batch.action[b, :, 0] - want[:, 0]).max() > 0.1
  with pytest.raises(ValueError, match='has 2 entries, and actions have 3'):
    statistics.norm_stats(folder, action_normalization_mask=(True, False))


def test_a_vector_of_one_number_is_one(tmp_path):
  # LeRobot stores it as a number, not as a list.
  found = [
    x._replace(action=x.action[:, :1], state=x.state[:, 1:])
    for x in map(lerobot_folder.episode, range(3))
  ]
  write.write(tmp_path / 'data', found, fps=lerobot_folder.FPS)
  made = make(str(tmp_path / 'data'))
  _, (batch,) = batches(made, made.init(0), 1)
  assert batch.action.shape == (4, 3, 1) and batch.obs['state'].shape == (4, 1)


# Windows.


def test_two_windows_at_most_are_in_memory():
  held, most = [], []

  def load(window):
    held.append(window)
    return np.concatenate([100 * i + np.arange(10) for i in window])

  made = windows.Windows([10] * 12, 30, load)
  for start in range(0, 480, 8):
    made.take(1, start, 8)
    most.append(len(made._held))
  assert max(most) == 2
  # Each window is read once an epoch: 4 epochs of 4, and the one ahead.
  assert len(held) <= 17


def test_what_fits_into_one_window_is_read_once():
  reads = []

  def load(window):
    reads.append(window)
    return np.arange(20)

  made = windows.Windows([10, 10], 30, load)
  rows = [made.take(1, start, 5) for start in range(0, 100, 5)]
  assert reads == [(0, 1)]
  for epoch in range(5):
    got = np.concatenate(rows[4 * epoch : 4 * epoch + 4])
    np.testing.assert_array_equal(np.sort(got), np.arange(20))


def test_the_episodes_of_an_epoch_are_put_in_order_once(monkeypatch):
  """Those of a large data set take seconds, and steps wait for it."""
  made, default_rng = [], np.random.default_rng

  def counted(seed):
    made.append(seed)
    return default_rng(seed)

  monkeypatch.setattr(windows.np.random, 'default_rng', counted)
  stream = windows.Windows([10] * 6, 20, lambda w: np.arange(10 * len(w)))
  for start in range(0, 55, 5):
    stream.take(7, start, 5)
  # Other generators shuffle the steps of a window.
  assert [seed for seed in made if len(seed) == 2] == [[7, 0]]


def test_a_batch_may_be_larger_than_an_epoch():
  made = windows.Windows(
    [3, 2], 2, lambda w: np.repeat(w, [(3, 2)[i] for i in w])
  )
  got = made.take(0, 2, 13)
  assert len(got) == 13
  np.testing.assert_array_equal(
    got, np.concatenate([made.take(0, 2, 6), made.take(0, 8, 7)])
  )


def test_an_error_of_the_thread_reaches_the_run():
  def load(window):
    raise ValueError('The disk is gone.')

  with pytest.raises(ValueError, match='The disk is gone'):
    windows.Windows([3], 2, load).take(0, 0, 1)


# Bad folders.


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'camera_names': ['observation.images.side']}, 'no camera .*side.*top'),
    ({'state': 'observation.torque'}, 'no vector .*torque.*observation.state'),
    ({'action': lerobot_folder.TOP}, 'no vector .*top'),
    ({'held_out_episodes': 5}, 'has 5 episodes, and 5 of them are held out'),
    (
      {'held_out_split': 'val'},
      "LeRobot folder, which has no split 'val'",
    ),
  ],
)
def test_a_name_that_the_folder_lacks_is_refused(folder, settings, message):
  with pytest.raises(ValueError, match=message):
    make(folder, **settings)


def in_column(folder, path, change=lambda rows: None):
  """A folder whose pictures are in a column of its first episode's numbers."""
  written, rows = lerobot_folder.episode(0), []
  for t, picture in enumerate(written.images[lerobot_folder.TOP]):
    stored = io.BytesIO()
    Image.fromarray(picture).save(stored, 'PNG')
    content = {'bytes': stored.getvalue(), 'path': None}
    row = {'episode_index': 0, 'frame_index': t, lerobot_folder.TOP: content}
    rows.append(row)
  change(rows)
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  feature = episodes_base.Feature('image', lerobot_folder.SHAPE)
  data = layout.read(folder)._replace(features={lerobot_folder.TOP: feature})
  return data, data.episodes[0]._replace(numbers=path)


def test_pictures_in_columns_are_those_that_were_written(folder, tmp_path):
  data, episode = in_column(folder, tmp_path / 'numbers.parquet')
  np.testing.assert_array_equal(
    pictures.read(data, episode, lerobot_folder.TOP),
    lerobot_folder.episode(0).images[lerobot_folder.TOP],
  )


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('frame_index', 6, 'Episode 0 .* has a picture of step 6, and 6 steps'),
    ('frame_index', -1, 'Episode 0 .* has a picture of step -1, and 6 steps'),
    (lerobot_folder.TOP, None, 'Step 2 of episode 0 .* has no picture of'),
    (
      lerobot_folder.TOP,
      {'bytes': b'GIF', 'path': None},
      'Step 2 of episode 0 .* has no picture of the camera .* can be read',
    ),
  ],
)
def test_wrong_pictures_in_columns_are_refused(
  folder, tmp_path, field, value, message
):
  path = tmp_path / 'numbers.parquet'
  change = lambda rows: rows[2].update({field: value})
  data, episode = in_column(folder, path, change)
  with pytest.raises(ValueError, match=message):
    pictures.read(data, episode, lerobot_folder.TOP)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
  x = lerobot_folder.episode(0)
  action = x.action.copy()
  action[2, 1] = np.nan
  write.write(tmp_path / 'data', [x._replace(action=action)] * 2, fps=10)
  with pytest.raises(ValueError, match="numbers in 'action' that are not fini"):
    statistics.norm_stats(str(tmp_path / 'data'))


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    # As many numbers as two lists of two have.
    ([[1.0, 2.0, 3.0], [4.0]], 'x of f has lists of different lengths, 1 to 3'),
    ([[1.0, 2.0], None], 'x of f has empty fields'),
    ([[[1.0], [2.0]]], 'x of f has lists of lists'),
  ],
)
def test_lists_of_different_lengths_are_refused(rows, message):
  with pytest.raises(ValueError, match=message):
    extra.array(pyarrow.chunked_array([rows]), 'x of f')


def test_a_part_of_a_column_has_its_own_rows():
  want = np.arange(20.0).reshape(10, 2)
  of_any_length = pyarrow.array(list(want), pyarrow.list_(pyarrow.float64()))
  of_two = pyarrow.FixedSizeListArray.from_arrays(want.reshape(-1), 2)
  for column in of_any_length, of_two:
    part = pyarrow.chunked_array([column[:4], column[4:]]).slice(3, 4)
    np.testing.assert_array_equal(extra.array(part, ''), want[3:7])
    assert len(extra.array(part.slice(0, 0), '')) == 0
