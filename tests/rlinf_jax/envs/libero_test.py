"""LIBERO in a pool: every task that there are meshes for."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import claims
from rlinf_jax.envs import (
  env_pool,
  libero,
  libero_files,
  simulator,
  task_turns,
)
from rlinf_jax.prepare import libero_script
from stages.envs import demonstrations, seed_source
from stages.envs.rollouts import rollout

pytest.importorskip(
  'libero', reason='LIBERO is not installed: say `make robots`.'
)
pytestmark = pytest.mark.slow
SUITES = 'libero_spatial', 'libero_object'
needs_meshes = pytest.mark.skipif(
  not os.environ.get(libero_files.ASSETS),
  reason=f'{libero_files.ASSETS} does not say where the meshes of LIBERO are.',
)
HOLD = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


@contextlib.contextmanager
def makes():
  """Makes pools, and closes them in the end."""
  pools = []

  def make_pool(n, processes=1, **settings):
    pools.append(env_pool.make_pool(libero.make, n, processes, **settings))
    return pools[-1]

  yield make_pool
  for pool in pools:
    pool.close()


@pytest.fixture
def make():
  with makes() as make_pool:
    yield make_pool


# Starting a pool takes five CPU-seconds.
@pytest.fixture(scope='module')
def of_cheese():
  """Two environments of the cream cheese."""
  setting = {'suite': SUITES[1], 'task_ids': (1,), 'horizon': 100}
  with makes() as make_pool:
    yield make_pool(2, step_timeout=300.0, **setting)


CAMERAS = {
  'suite': SUITES[1],
  'cameras': ('front', 'wrist'),
  'image_size': 64,
  'step_timeout': 300.0,
}


@pytest.fixture(scope='module')
def with_cameras():
  """An environment of the alphabet soup, and one of the cream cheese."""
  with makes() as make_pool:
    yield make_pool(2, task_ids=(0, 1), **CAMERAS)


@needs_meshes
@pytest.mark.parametrize('suite', claims.some(SUITES, ['libero_object']))
def test_every_task_builds_resets_and_steps(make, suite):
  pool = make(10, suite=suite, task_ids=range(10), step_timeout=300.0)
  observations = []
  for seed in (0, 10, 500):  # Of ten tasks, the attempts 0, 1 and 50.
    token, obs = pool.init(10 * [seed])
    token, timestep = pool.step(token, np.tile(HOLD, (10, 1)))
    assert np.isfinite(timestep.obs).all()
    assert not timestep.reward.any() and not timestep.env_failed.any()
    observations.append(obs)
  # The attempt 50 is 0 again, of fifty initial states.
  np.testing.assert_array_equal(observations[0], observations[2])
  assert (observations[0] != observations[1]).any(1).all()


def test_tasks_are_read_as_the_package_reads_them():
  """It imports torch for that, and the simulator's processes do not."""
  libero_files._imported()
  from libero.libero import benchmark
  import torch

  root = pathlib.Path(benchmark.__file__).parents[1]
  suites = libero_files._suites(root)
  assert suites == benchmark.libero_task_map and len(suites) > 4
  for suite, names in suites.items():
    for name in names:
      text = benchmark.grab_language_from_filename(f'{name}.bddl')
      assert libero_files.instruction(name) == text
    file = root / 'init_files' / suite / f'{names[0]}.pruned_init'
    want = torch.load(file, weights_only=False)
    got = libero_files.initial_states(suite, names[0])
    np.testing.assert_array_equal(got, want)


@needs_meshes
def test_an_episode_replays_to_the_bit_in_one_process_or_two(make):
  rng = np.random.default_rng(0)
  action_TBA = rng.uniform(-1, 1, (12, 2, 7)).astype(np.float32)
  observations = []
  for processes in (1, 2):
    setting = {'suite': SUITES[0], 'horizon': 8, 'step_timeout': 300.0}
    pool = make(2, processes, **setting)
    token, obs = pool.init([4, 5])
    observations.append([obs])
    for action_BA in action_TBA:
      token, timestep = pool.step(token, action_BA)
      observations[-1] += [timestep.obs, timestep.final_obs]
  assert timestep.truncated.sum() == 0
  np.testing.assert_array_equal(*observations)


@needs_meshes
def test_an_episode_does_not_depend_on_the_one_before(of_cheese):
  started = []
  for gripper in (-1.0, 1.0):  # It opens, and it closes.
    token, _ = of_cheese.init([3, 3])
    for _ in range(3):
      move = np.tile(HOLD, (2, 1))
      move[:, -1] = gripper
      token, _ = of_cheese.step(token, move)
    started.append(of_cheese.init([3, 3])[1])
  np.testing.assert_array_equal(*started)


@needs_meshes
def test_observations_hold_images_by_camera_and_the_instruction(with_cameras):
  token, obs = with_cameras.init([0, 0])
  instructions = [bytes(x).rstrip(b'\0').decode() for x in obs['instruction']]
  assert instructions == [
    f'pick up the {thing} and place it in the basket'
    for thing in ('alphabet soup', 'cream cheese')
  ]
  for image in obs['image'].values():
    assert image.shape == (2, 64, 64, 3) and image.dtype == np.uint8
    assert image.std() > 10  # It shows something.
  token, timestep = with_cameras.step(token, np.stack([HOLD, HOLD]))
  assert timestep.obs['state'].shape == obs['state'].shape


@needs_meshes
def test_images_are_those_that_the_simulator_itself_observes():
  """In a process of its own, as simulators are: it loads OpenGL."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.rlinf_jax.envs.libero_pictures'],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


@needs_meshes
def test_a_camera_that_there_is_not_is_refused():
  with pytest.raises(simulator.UnavailableError, match='front and wrist.*side'):
    libero.make(0, SUITES[1], cameras=('front', 'side'))


@needs_meshes
def test_observations_are_as_in_published_data_sets(make, with_cameras):
  prompts = {
    'token': np.arange(30, dtype=np.int32).reshape(10, 3),
    'mask': np.ones((10, 3), np.int32),
  }
  other = make(1, task_ids=(1,), as_published=True, prompts=prompts, **CAMERAS)
  (_, want), (_, obs) = with_cameras.init([0, 0]), other.init([0])
  assert {*obs} == {'state', 'image', 'prompt'}
  np.testing.assert_array_equal(obs['prompt']['token'], [[3, 4, 5]])
  for name, image in obs['image'].items():
    np.testing.assert_array_equal(image, want['image'][name][1:, :, ::-1])
  assert obs['state'].shape == (1, 8) and np.isfinite(obs['state']).all()
  # The gripper looks down: about half a turn around the first axis.
  axis = obs['state'][0, 3:6]
  assert abs(np.linalg.norm(axis) - np.pi) < 0.3 and abs(axis[0]) > 2.5


@needs_meshes
def test_a_gripper_that_opens_by_one_is_turned_to_libero_s_own(make, of_cheese):
  setting = {'suite': SUITES[1], 'task_ids': (1,), 'step_timeout': 300.0}
  plain, turned = of_cheese, make(1, gripper_opens=True, **setting)
  assert (plain.spec.low[-1], turned.spec.low[-1]) == (-1.0, 0.0)
  shown = []
  for pool, opens, closes in ((plain, -1.0, 1.0), (turned, 0.7, 0.2)):
    token, _ = pool.init([0])
    shown.append([])
    for value in (opens, closes, closes):
      action_1A = np.zeros((1, 7), np.float32)
      action_1A[0, -1] = value
      token, timestep = pool.step(token, action_1A)
      shown[-1].append(timestep.obs)
  np.testing.assert_array_equal(*shown)
  assert np.abs(shown[0][0] - shown[0][2]).max() > 1e-3  # It moved.


@needs_meshes
def test_the_script_puts_the_cream_cheese_into_the_basket(of_cheese):
  x, succeeded = demonstrations.collect(
    env_pool.from_pool(of_cheese),
    libero_script.to_basket,
    num_envs=2,
    noise_std=0.0,
    num_episodes=2,
  )
  assert succeeded == 2
  assert len(x.obs) < 2 * 100  # Steps after the end are left out.


@needs_meshes
def test_video_changes_no_bit_and_shows_the_arm_move(make):
  pool = make(
    2, 1, suite=SUITES[1], task_ids=(1,), horizon=6, step_timeout=300.0
  )
  observations = []
  for rows in (0, 1):
    token, obs = pool.init([4, 5], rows=rows, every=2)
    for _ in range(6):
      token, timestep = pool.step(token, np.ones((2, 7), np.float32))
      obs = np.concatenate([obs, timestep.final_obs])
    observations.append(obs)
  np.testing.assert_array_equal(*observations)
  (frame,), shown = pool.frames(token[:1], np.array([[0, 2, 4, 6]]))
  assert shown.tolist() == [1]
  change = np.abs(np.diff(frame.astype(int), axis=0))
  assert (change.max((1, 2, 3)) > 50).all() and np.median(change) < 5


def test_missing_meshes_are_reported_before_anything_is_downloaded(
  make, tmp_path, monkeypatch
):
  monkeypatch.setenv(libero_files.ASSETS, str(tmp_path))
  with pytest.raises(simulator.UnavailableError) as error:
    make(1, suite=SUITES[0])
  for part in (str(tmp_path), 'lerobot/libero-assets', libero_files.ASSETS):
    assert part in str(error.value)
  assert not list(pathlib.Path(tmp_path).iterdir())


def test_adjacent_environments_of_a_group_have_one_task(monkeypatch):
  monkeypatch.setattr(libero_files, 'tasks', lambda suite: ['a', 'b', 'c'])
  monkeypatch.setattr(libero, 'Libero', lambda suite, name, *_: name)
  names = [libero.make(i, 's', task_ids=(0, 2), group_size=2) for i in range(6)]
  assert names == ['a', 'a', 'c', 'c', 'a', 'a']


@pytest.mark.parametrize(
  'tasks, group_size, held_out_batch',
  [(10, 1, 10), (10, 1, 50), (1, 1, 25), (10, 5, 50), (3, 2, 30), (1, 8, 25)],
)
def test_an_evaluation_starts_in_every_initial_state_once(
  tasks, group_size, held_out_batch
):
  """Also where environments are in groups, as those of training."""
  turns = task_turns.Turns(tasks, group_size)
  source = seed_source.seeds(held_out=50 * tasks, held_out_batch=held_out_batch)
  started = [[] for _ in range(tasks)]
  for seeds in source.held_out():
    for i, seed in enumerate(seeds.tolist()):
      started[turns.task(i)].append(turns.scene(seed, 50))
  assert [sorted(x) for x in started] == [[*range(50)]] * tasks


@pytest.mark.parametrize('num_envs, group_size', [(25, 1), (5, 1), (10, 2)])
def test_an_evaluation_of_tasks_with_unequal_attempts_is_refused(
  num_envs, group_size
):
  settings = {'task_ids': range(10), 'group_size': group_size}
  with pytest.raises(ValueError, match=f'{num_envs} environments are no mul'):
    libero.env('libero_spatial', num_envs, equal_tasks=True, **settings)


@needs_meshes
def test_environments_tell_their_tasks_by_name(of_cheese, monkeypatch):
  monkeypatch.setattr(env_pool, 'make_pool', lambda *_, **__: of_cheese)
  settings = {'num_envs': 5, 'suite': SUITES[1], 'step_timeout': 300.0}
  env = libero.env(task_ids=(3, 0, 3), group_size=2, **settings)
  names = libero_files.tasks(SUITES[1])
  assert env.tasks == (names[3], names[0])
  token_B3 = np.arange(9, dtype=np.int32)[:, None] * [1, 0, 0]
  assert env.task(token_B3).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1]
  assert env.task(token_B3).dtype == np.int32
  assert not libero.env(**settings).tasks  # One task has no name of its own.


@pytest.mark.parametrize('group_size', [1, 2])
def test_training_starts_in_every_initial_state_as_often(group_size):
  n = 40_000
  draw = rollout.draw_seeds(n, group_size=2)
  seeds = np.asarray(draw(jax.random.key(0)))
  states = task_turns.Turns(10, group_size).scene(seeds, 50).reshape(n, 2)
  assert (states[:, 0] == states[:, 1]).all()  # Those of a group agree.
  counts = np.bincount(states[:, 0], minlength=50)
  # Six standard deviations, of 50 counts.
  assert np.abs(counts - n / 50).max() < 6 * np.sqrt(n / 50)
