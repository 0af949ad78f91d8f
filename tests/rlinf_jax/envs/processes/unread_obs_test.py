"""Observations that are made only where a policy reads them."""

import os
import signal

import numpy as np
import pytest

from rlinf_jax.envs import env_pool
from tests.rlinf_jax.envs.processes import counting


@pytest.fixture
def pool():
  found = []

  def make(n=2):
    found.append(
      env_pool.make_pool(counting.watched, n, 1, chunk=4, say=said.append)
    )
    return found[-1], said

  said = []
  yield make
  for x in found:
    x.close()


def chunks(*rows):
  return np.array(rows, np.float32)[..., None]


def test_a_chunk_is_seen_after_its_last_step_alone(pool):
  env, said = pool(1)
  token, obs = env.init([3])
  np.testing.assert_array_equal(obs, [[3, 0]])
  token, timestep = env.step(token, chunks([0, 0, 0, 0]))
  np.testing.assert_array_equal(timestep.obs, [[3, 4]])
  # Four steps, before each of which the start alone had been looked at.
  np.testing.assert_array_equal(timestep.reward, [4])
  token, timestep = env.step(token, chunks([0, 0, 0, 0]))
  np.testing.assert_array_equal(timestep.final_obs, [[3, 6]])
  np.testing.assert_array_equal(timestep.truncated, [1])
  np.testing.assert_array_equal(timestep.reward, [2 * 2])
  token, timestep = env.step(token, chunks([0, counting.WIN, 0, 0]))
  np.testing.assert_array_equal(timestep.terminated, [1])
  np.testing.assert_array_equal(timestep.final_obs[:, 1], [2])
  assert not said


def test_an_episode_is_restored_by_looking_at_its_last_step_alone(pool):
  env, said = pool(2)
  token, _ = env.init([3, 5])
  token, _ = env.step(token, chunks(4 * [0], 4 * [0]))
  os.kill(env.pids[0], signal.SIGKILL)
  token, timestep = env.step(token, chunks([0, 0, 0, 0], [0, 0, 0, 0]))
  np.testing.assert_array_equal(timestep.final_obs, [[3, 6], [5, 6]])
  assert not env.failed_episodes and len(said) == 1  # The process restarts.


@pytest.mark.parametrize(
  ['chunk', 'message'],
  [
    ([0, 0, counting.RAISE, 0], 'the physics exploded'),
    ([0, 0, 0, counting.NAN], 'the screen is black'),
  ],
)
def test_a_chunk_that_fails_ends_where_it_was_last_seen(pool, chunk, message):
  env, said = pool(2)
  token, _ = env.init([3, 5])
  token, timestep = env.step(token, chunks(chunk, 4 * [0]))
  np.testing.assert_array_equal(timestep.env_failed, [1, 0])
  np.testing.assert_array_equal(timestep.final_obs[0], [3, 0])
  np.testing.assert_array_equal(timestep.obs[1], [5, 4])
  assert message in said[0]


def test_a_picture_that_nobody_sees_is_not_drawn(pool):
  env, said = pool(1)
  token, _ = env.init([3])
  _, timestep = env.step(token, chunks([0, counting.NAN, 0, 0]))
  np.testing.assert_array_equal(timestep.obs, [[3, 4]])
  assert not said
