"""ManiSkill in a pool: bit for bit what its bare environments do."""

from concurrent import futures
import contextlib
import importlib.util
import multiprocessing
import os
import signal

import jax
import numpy as np
import pytest

import claims
from rlinf_jax.envs import (
  env_pool,
  maniskill,
  maniskill_drawing,
  simulator,
)

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    # It is looked for and not imported: simulators live in other processes.
    importlib.util.find_spec('mani_skill') is None,
    reason='ManiSkill is not installed: pip install "rlinf-jax[maniskill]"',
  ),
]
TASK, A = 'PushCube-v1', 8
N, T = 4, 70  # Beyond the end of an episode, which is at 50.


@contextlib.contextmanager
def makes():
  """Makes pools, and closes them in the end."""
  pools = []

  def make_pool(n=N, processes=2, task=TASK, **settings):
    pools.append(
      env_pool.make_pool(maniskill.make, n, processes, task=task, **settings)
    )
    return pools[-1]

  yield make_pool
  for pool in pools:
    pool.close()


@pytest.fixture
def make():
  with makes() as make_pool:
    yield make_pool


@pytest.fixture(scope='module')
def pool():
  """Two processes: starting one takes some CPU-seconds."""
  with makes() as make_pool:
    yield make_pool()


@pytest.fixture(scope='module')
def filmed():
  """A pool of one process that can film, and what it says."""
  messages = []
  with makes() as make_pool:
    yield make_pool(processes=1, video=True, say=messages.append), messages


@pytest.fixture(scope='module')
def reference(pool):
  """A trajectory in two processes, which nothing disturbs."""
  timesteps = play(pool)
  assert pool.failed_episodes == 0 and not pool.failures
  assert sum(timestep.truncated.sum() for timestep in timesteps[1:]) == N
  return timesteps


def actions(T=T, n=N):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (T, n, A)).astype(np.float32)


def play(pool, before=lambda t: None, **films):
  token, obs = pool.init(np.arange(N) + 100, **films)
  timesteps = [obs]
  for t, action_NA in enumerate(actions()):
    before(t)
    token, timestep = pool.step(token, action_NA)
    timesteps.append(timestep)
  return timesteps


def same(x, y):
  return all(map(np.array_equal, jax.tree.leaves(x), jax.tree.leaves(y)))


# In `make test`, a recorded trajectory is compared with it: in one process.
@pytest.mark.claims
@pytest.mark.parametrize('processes', [1, 4])
def test_trajectories_are_bit_equal_in_1_2_and_4_processes(
  make, reference, processes
):
  assert same(play(make(processes=processes)), reference)


def bare(i: int):
  """Environment `i` as Gymnasium builds it, with ManiSkill's limit of time."""
  import gymnasium
  import mani_skill.envs  # noqa: F401

  maniskill.make(0, TASK).close()  # Checks rendering first.
  env = gymnasium.make(
    TASK,
    num_envs=1,
    obs_mode='state',
    control_mode='pd_joint_delta_pos',
    reward_mode='normalized_dense',
    sim_backend='physx_cpu',
    render_backend='none',
  )
  obs, _ = env.reset(seed=100 + i)
  steps = [np.array(obs[0])]
  for t, action_NA in enumerate(actions()):
    obs, reward, terminated, truncated, info = env.step(action_NA[i])
    ends = bool(terminated[0]), bool(truncated[0] & ~terminated[0])
    last = np.array(obs[0])
    if terminated[0] or truncated[0]:
      obs, _ = env.reset(seed=simulator.episode_seed(100 + i, t + 1))
    success, now = bool(info['success'][0]), np.array(obs[0])
    steps.append((last, np.float32(reward[0]), *ends, success, now))
  env.close()
  return steps


def test_a_pool_equals_a_loop_over_bare_environments(reference):
  timesteps = reference
  spawn = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(1, spawn) as process:
    bares = [*process.map(bare, (0, 3))]
  for i, (first, *steps) in zip((0, 3), bares, strict=True):
    np.testing.assert_array_equal(timesteps[0][i], first)
    for got, (last, reward, *ends, now) in zip(
      timesteps[1:], steps, strict=True
    ):
      np.testing.assert_array_equal(got.final_obs[i], last)
      assert got.reward[i] == reward
      assert [got.terminated[i], got.truncated[i], got.success[i]] == ends
      np.testing.assert_array_equal(got.obs[i], now)


def test_a_killed_process_brings_its_environments_back_to_the_bit(
  pool, reference
):
  def kill(t):
    if t == 60:  # Between calls, so no environment fails.
      os.kill(pool.pids[1], signal.SIGKILL)

  failed, failures = pool.failed_episodes, len(pool.failures)
  assert same(reference, play(pool, kill))
  assert (pool.failed_episodes, len(pool.failures)) == (failed, failures)


def test_another_process_continues_from_a_snapshot_to_the_bit(pool, filmed):
  other, _ = filmed
  token, _ = pool.init(np.arange(N) + 100)
  for action_NA in actions(20):
    token, _ = pool.step(token, action_NA)
  after = other.load(token, pool.save(token))
  for action_NA in actions(40):  # Beyond the end of the episode.
    token, want = pool.step(token, action_NA)
    after, timestep = other.step(after, action_NA)
    assert same(want, timestep)
  assert other.failed_episodes == 0 and not other.failures


def test_an_observation_of_nan_costs_one_episode(pool):
  failures = len(pool.failures)
  token, _ = pool.init(np.arange(N))
  action_NA = actions()[0]
  token, _ = pool.step(token, action_NA)
  action_NA[2] = np.nan  # An invalid action.
  token, timestep = pool.step(token, action_NA)
  assert timestep.env_failed.tolist() == [0, 0, 1, 0]
  assert (
    np.isfinite(timestep.obs).all() and np.isfinite(timestep.final_obs).all()
  )
  (fault,) = list(pool.failures)[failures:]
  assert fault.env_id == 2 and 'lost' in fault.message
  token, timestep = pool.step(token, actions()[1])
  assert not timestep.env_failed.any()


def test_missing_assets_are_reported(make, tmp_path, monkeypatch):
  monkeypatch.setenv('MS_ASSET_DIR', str(tmp_path))
  with pytest.raises(simulator.UnavailableError) as error:
    make(1, 1, task='PickSingleYCB-v1')
  for part in ('mani_skill2_ycb is not there', 'download_asset', 'MS_ASSET_DI'):
    assert part in str(error.value)
  assert not list(tmp_path.rglob('mani_skill2_ycb'))
  with pytest.raises(simulator.UnavailableError, match='but.* PushCube-v1'):
    make(1, 1, task='PushCub-v1')


def test_image_observations_hold_cameras_and_proprioception(make):
  try:
    pool = make(1, 1, images=True, image_size=32)
  except simulator.UnavailableError as error:
    assert 'need a Vulkan device' in str(error)
    pytest.skip(str(error))
  action_1A = actions(2, 1)[0]
  token, obs = pool.init(np.arange(1))
  assert obs['state'].shape == (1, 9 + 9 + 7)  # Joints, speeds, the tool.
  assert obs['state'].dtype == np.float32
  (camera,) = obs['image'].values()
  assert camera.shape == (1, 32, 32, 3) and camera.dtype == np.uint8
  assert camera.std() > 10  # Of a scene, and not of nothing.
  _, timestep = pool.step(token, action_1A)
  (moved,) = timestep.obs['image'].values()
  assert (moved != camera).any()


def test_images_without_a_vulkan_device_are_refused(make, monkeypatch):
  monkeypatch.setenv('VK_ICD_FILENAMES', os.devnull)
  with pytest.raises(simulator.UnavailableError) as error:
    make(1, 1, images=True)
  for part in ('Vulkan device', 'mesa-vulkan-drivers', 'tasks by state'):
    assert part in str(error.value)


@pytest.mark.parametrize('sees', claims.some([True, False], keep=[True]))
def test_recording_video_in_one_process_changes_no_time_step(
  make, reference, monkeypatch, filmed, sees
):
  filmed, messages = filmed
  if not sees:
    monkeypatch.setenv('VK_ICD_FILENAMES', os.devnull)
    messages = []
    filmed = make(processes=1, video=True, say=messages.append)
  messages.clear()  # Of snapshots that it has loaded.
  assert same(reference, play(filmed, rows=2, every=10))
  token = np.stack([np.arange(2)] * 3, 1)
  time_2M = np.tile(np.arange(0, 51, 10), (2, 1))
  frame, shown_2 = filmed.frames(token, time_2M)
  if shown_2.any():
    assert sees and shown_2.all() and not messages
    size = maniskill_drawing.VIDEO_SIZE
    assert frame.shape == (2, 6, size, size, 3)
    assert frame.std((2, 3, 4)).min() > 10  # Of a scene, and not of nothing.
    assert len({x.tobytes() for x in frame[0]}) == 6
  else:
    (message,) = messages
    assert 'no video' in message and 'need a Vulkan device' in message
