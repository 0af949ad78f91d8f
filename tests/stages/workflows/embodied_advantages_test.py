"""Advantages of episodes and of steps, compared in groups."""

import itertools
import statistics

import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.learn import advantages, turn_advantages
from stages.workflows.embodied_grpo import group_advantage

GROUP = 4


def timestep_of(done, success=None, reward=None, env_failed=None):
  """Rows that end as `done` says; what else is not given is zero."""
  done = jnp.asarray(done, float)
  given = [
    0.0 * done if x is None else jnp.asarray(x, float) + 0.0 * done
    for x in (success, reward)
  ]
  success, reward = given
  if env_failed is not None:
    env_failed = jnp.asarray(env_failed, float)
  return env_lib.TimeStep(
    (), reward, done, 0 * done, (), success, env_failed=env_failed
  )


def compared(
  timestep, group_size=2, judge=episode_stats.success, filtered=False
):
  fields = group_advantage(
    group_size, judge, advantages.group_relative, filtered, timestep
  )
  return np.asarray(fields['mask']), np.asarray(fields['advantage'])


ENDS = [[0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]]


FIRST = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]


def test_an_episode_is_one_advantage_and_nothing_counts_after_its_end():
  # Row 0 succeeds as it ends, row 1 after its end, the others not at all.
  success = [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]]
  mask, advantage = compared(timestep_of(ENDS, success))
  np.testing.assert_array_equal(mask, FIRST)
  half = 0.5 / (np.sqrt(0.5) + 1e-6)  # Of 1 and 0, and their deviation.
  want = np.array([[half], [-half], [0], [0]]) * np.array(FIRST)
  np.testing.assert_allclose(advantage, want, rtol=1e-6)


def test_success_at_some_moment_of_the_first_episode_is_enough():
  success = [[1, 0, 0, 0], [0, 0, 0, 0], [0] * 4, [0] * 4]
  _, advantage = compared(timestep_of(ENDS, success))
  assert advantage[0, 0] > 0 > advantage[1, 0]


def test_what_it_returned_may_count_instead():
  reward = [[1, 2, 9, 9], [1, 1, 1, 1], [5, 9, 9, 9], [1, 1, 1, 9]]
  _, advantage = compared(
    timestep_of(ENDS, reward=reward), judge=episode_stats.episode_return
  )
  # 3 against 4, and 5 against 3.
  assert (np.sign(advantage[:, 0]) == [-1, 1, 1, -1]).all()
  np.testing.assert_allclose(np.abs(advantage[:, 0]), 2**-0.5, rtol=1e-5)


def test_groups_of_equal_rewards_may_be_masked():
  success = [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
  mask, advantage = compared(timestep_of(ENDS, success), filtered=True)
  np.testing.assert_array_equal(mask, [*FIRST[:2], [0] * 4, [0] * 4])
  _, unfiltered = compared(timestep_of(ENDS, success))
  np.testing.assert_array_equal(advantage, unfiltered)


@pytest.mark.parametrize('worth', [0.1, 1.0])
def test_an_episode_whose_simulator_failed_does_not_count(worth):
  ends, lost = np.ones((8, 1)), np.zeros((8, 1))
  lost[[1, 4, 5, 6, 7]] = 1.0
  reward = np.full((8, 1), worth)
  reward[1] = 7.0
  timestep = timestep_of(ends, reward=reward, env_failed=lost)
  mask, advantage = compared(timestep, GROUP, episode_stats.episode_return)
  # Three equal rewards have equal advantages, to the bit; in the second group
  # all four episodes failed.
  np.testing.assert_array_equal(mask, 1.0 - lost)
  assert not advantage.any()
  reward[0] += 1.0
  timestep = timestep_of(ends, reward=reward, env_failed=lost)
  _, advantage = compared(timestep, GROUP, episode_stats.episode_return)
  assert advantage[1] == 0 and advantage[0] > 0
  np.testing.assert_allclose(advantage.sum(), 0.0, atol=1e-6)


def random_steps(seed, B=8, T=6):
  """Time steps of random episodes; simulators fail in some, and others end."""
  rng = np.random.default_rng(seed)
  done = rng.random((B, T)) < 0.2
  failed = done & (rng.random((B, T)) < 0.3)
  reward = rng.choice([0.0, 0.5, 1.0, rng.normal()], (B, T))
  return done, failed, reward


@pytest.mark.parametrize('seed', range(10))
def test_steps_are_compared_with_equal_steps_of_their_group(seed, in_float64):
  done, failed, reward = random_steps(seed)
  got = group_advantage(
    GROUP,
    episode_stats.success,
    advantages.group_relative,
    False,
    timestep_of(done, reward=reward, env_failed=failed),
    turn_advantage=turn_advantages.by_turn(0.9),
  )
  B, T = done.shape
  want = np.zeros((B, T))
  length = [(row.argmax() + 1 if row.any() else T) for row in done]
  kept = [not failed[i, : length[i]].any() for i in range(B)]
  for i, t in itertools.product(range(B), range(T)):
    start = i // GROUP * GROUP
    others = [
      j for j in range(start, start + GROUP) if kept[j] and t < length[j]
    ]
    to_go = {
      j: sum(0.9 ** (k - t) * reward[j, k] for k in range(t, length[j]))
      for j in others
    }
    if i in others and len(others) > 1:
      values = list(to_go.values())
      if max(values) > min(values):
        spread = statistics.stdev(values) + 1e-6
        want[i, t] = (to_go[i] - statistics.mean(values)) / spread
  np.testing.assert_allclose(got['advantage'], want, rtol=1e-9, atol=1e-9)
  mask = [[kept[i] and t < length[i] for t in range(T)] for i in range(B)]
  np.testing.assert_array_equal(got['mask'], mask)


def advantage_of(timestep, turn_advantage=None):
  """Advantages of steps, from the returns of whole groups."""
  return group_advantage(
    GROUP,
    episode_stats.episode_return,
    advantages.group_relative,
    False,
    timestep,
    turn_advantage=turn_advantage,
  )['advantage']


def test_only_first_steps_are_known_to_be_in_equal_states(in_float64):
  done, failed, reward = random_steps(3)
  timestep = timestep_of(done, reward=reward, env_failed=0 * failed)
  by_state = advantage_of(timestep, turn_advantages.by_state(1.0))
  whole = advantage_of(timestep)
  # At the first step the return to go is that of the episode.
  mask = np.array(episode_stats.in_first_episode(timestep))
  mask[:, 0] *= 2.0
  np.testing.assert_allclose(by_state, mask * whole, rtol=1e-9, atol=1e-12)


def test_a_failed_episode_does_not_move_the_mean_of_whole_episodes(in_float64):
  done, failed, reward = random_steps(3)
  assert failed.any()
  timestep = timestep_of(done, reward=reward, env_failed=failed)
  of_episode = advantage_of(timestep, turn_advantages.by_state(weight=0.0))
  whole = advantage_of(timestep)
  np.testing.assert_allclose(of_episode, whole, rtol=1e-9, atol=1e-12)
