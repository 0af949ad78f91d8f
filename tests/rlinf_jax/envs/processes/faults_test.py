"""Simulators that raise, hang or are killed lose their own episode alone."""

import os
import re
import signal

import jax
import numpy as np
import pytest

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import worker
from tests.rlinf_jax.envs.processes import counting

STEP_TIMEOUT = 4.0  # Of pools in which a simulator hangs.


FAULTS = {
  'raises': (
    counting.RAISE,
    'failed in `step`: RuntimeError: the physics exploded',
  ),
  'is killed': (
    counting.KILL,
    'stepping when its process was killed by SIGKILL',
  ),
  'shows NaN': (
    counting.NAN,
    'failed in `step`: ValueError: its observation is not fin',
  ),
  'pays more than float32 holds': (
    counting.OVERPAID,
    'failed in `step`: ValueError: its reward is 1e+300',
  ),
  'hangs': (
    counting.HANG,
    'stepping when its process did not answer for 4 seconds',
  ),
  'hangs in reset': (
    counting.HANG_RESET,
    'resetting when its process did no',
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('fault, message', FAULTS.values(), ids=FAULTS)
def test_a_failure_loses_one_episode_and_no_other(make, fault, message):
  action_TBA = counting.actions(20, 6)
  reference, _ = make()
  hangs = fault in (counting.HANG, counting.HANG_RESET)
  limit = {'step_timeout': STEP_TIMEOUT} if hangs else {}
  disturbed, messages = make(**limit)
  token, _ = reference.init(np.arange(6))
  other, _ = disturbed.init(np.arange(6))
  failing, failing_call = 2, 10
  rest, timestep = np.arange(6) != failing, None
  for t, action_BA in enumerate(action_TBA):
    token, want = reference.step(token, action_BA)
    if t == failing_call:
      action_BA = action_BA.copy()
      action_BA[failing] = fault
      before = timestep.obs[failing]
    other, timestep = disturbed.step(other, action_BA)
    for x, y in zip(*map(jax.tree.leaves, (want, timestep)), strict=True):
      np.testing.assert_array_equal(x[rest], y[rest])
    if t == failing_call:
      assert timestep.env_failed[failing] == timestep.truncated[failing] == 1
      assert timestep.reward[failing] == timestep.terminated[failing] == 0
      np.testing.assert_array_equal(timestep.final_obs[failing], before)
      # The next episode, by the next seed, or the one after if that hung.
      seeds = [
        simulator.episode_seed(failing, failing_call + 1, k) for k in (0, 1)
      ]
      seed = seeds[fault == counting.HANG_RESET]
      assert (
        timestep.obs[failing, 0] == seed % 1000
        and timestep.obs[failing, 1] == 0
      )
    else:
      assert not timestep.env_failed.any()
  assert disturbed.failed_episodes == 1 and not reference.failed_episodes
  (fault,) = disturbed.failures
  assert (fault.env_id, fault.call) == (failing, failing_call)
  assert message in fault.message and 'episode is lost' in fault.message
  assert re.match(
    f'Environment {failing}, at call {failing_call}, .*', messages[0]
  )


def test_an_episode_that_fails_to_start_is_started_by_another_seed(make):
  pool, messages = make()
  token, _ = pool.init(np.arange(6))
  token, timestep = counting.act(pool, token, 0, 0, 0, counting.BAD_RESET, 0, 0)
  # It had ended well.
  assert timestep.terminated[3] and not timestep.env_failed.any()
  assert timestep.obs[3, 0] == simulator.episode_seed(3, 1, attempt=1) % 1000
  assert '3, at call 0, failed in `reset` by seed' in messages[0]
  assert 'the arm is not there' in messages[0]


def test_a_process_killed_between_calls_loses_no_episode(make):
  reference, _ = make()
  disturbed, messages = make()
  token, _ = reference.init(np.arange(6))
  other, _ = disturbed.init(np.arange(6))
  for t, action_BA in enumerate(counting.actions(20, 6)):
    if t == 10:
      os.kill(disturbed.pids[1], signal.SIGKILL)
    token, want = reference.step(token, action_BA)
    other, timestep = disturbed.step(other, action_BA)
    for x, y in zip(want, timestep, strict=True):
      np.testing.assert_array_equal(x, y)
  assert (
    not disturbed.failed_episodes
    and 'was killed by SIGKILL and is restarted' in messages[0]
  )


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_worker_ignores_signals_until_its_parent_ends(make, number):
  pool, messages = make()
  token, _ = pool.init(np.arange(6))
  pids = pool.pids
  for pid in pids:
    os.kill(pid, number)
  counting.act(pool, token, *range(6))
  assert pool.pids == pids and not pool.failed_episodes and not messages
  pool.close()
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_a_program_that_a_simulator_starts_is_ended_by_terminate(make):
  pool, messages = make(2, 1)
  token, _ = pool.init(np.arange(2))
  counting.act(pool, token, counting.START, 0)
  assert not pool.failed_episodes and not messages


def test_only_the_environment_that_cannot_be_restored_is_lost(
  make, tmp_path, monkeypatch
):
  monkeypatch.setenv('TOYS_MARK', str(tmp_path / 'mark'))
  pool, _ = make(6, 2)
  token, _ = pool.init(np.arange(6))
  token, _ = counting.act(pool, token, 0, 0, counting.KILL_AGAIN, 0, 0, 0)
  token, timestep = counting.act(
    pool, token, counting.KILL, 1, 1, 1, 1, 1
  )  # Environment 2 is in that process.
  assert timestep.env_failed.tolist() == [1, 0, 1, 0, 0, 0]
  assert [fault.env_id for fault in pool.failures] == [0, 2]
  np.testing.assert_array_equal(timestep.obs[:, 1], [0, 2, 0, 2, 2, 2])  # Time.
  token, timestep = counting.act(pool, token, *6 * [1])
  assert not timestep.env_failed.any()


def test_an_environment_that_always_fails_is_given_up(make):
  pool, _ = make()
  token, _ = pool.init(np.arange(6))
  with pytest.raises(worker.BrokenError, match='Environment 4 failed 10 times'):
    for _ in range(20):
      token, _ = counting.act(pool, token, 0, 0, 0, 0, counting.RAISE, 0)


def test_an_environment_that_cannot_be_built_is_refused_at_once(make):
  with pytest.raises(simulator.UnavailableError, match='No environment could'):
    make(name='toys/Nothing-v0')
  with pytest.raises(ValueError, match='no process without an environment'):
    make(2, 3)
