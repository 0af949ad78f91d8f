"""Episodes are counted when they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.envs import action_chunks, episode_stats
from stages.envs import env as env_lib


def timestep_of(reward, done, success, **kwargs):
  reward, done, success = (
    jnp.asarray([x], float) for x in (reward, done, success)
  )
  return env_lib.TimeStep((), reward, 0 * done, done, (), success, **kwargs)


def test_episodes_are_counted_when_they_end_however_batches_are_cut():
  reward = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
  done = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
  success = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
  whole = timestep_of(reward, done, success)
  open_, ended = episode_stats.update(episode_stats.init(1), whole)
  assert [float(x[0]) for x in ended] == [2.0, 15.0, 5.0, 2.0, 1.0]
  assert [float(x[0]) for x in open_] == [6.0, 1.0, 0.0]
  for at in range(1, 6):
    one, first = episode_stats.update(
      episode_stats.init(1), jax.tree.map(lambda x, at=at: x[:, :at], whole)
    )
    two, second = episode_stats.update(
      one, jax.tree.map(lambda x, at=at: x[:, at:], whole)
    )
    both = jax.tree.map(jnp.add, first, second)
    jax.tree.map(np.testing.assert_array_equal, (two, both), (open_, ended))


def test_an_episode_whose_simulator_failed_is_not_counted():
  lost = jnp.array([[0.0, 1.0, 0.0, 0.0]])
  timestep = timestep_of([1.0] * 4, [0, 1, 0, 1], [1, 0, 0, 0], env_failed=lost)
  open_, ended = episode_stats.update(episode_stats.init(1), timestep)
  assert [float(x[0]) for x in ended] == [1.0, 2.0, 2.0, 0.0, 0.0]
  assert float(episode_stats.first_episode(timestep).count[0]) == 0


def test_first_episode_stats_ignore_later_episodes():
  timestep = timestep_of([1.0, 2, 4, 8], [0, 1, 0, 1], [1, 0, 1, 1])
  first = episode_stats.first_episode(timestep)
  assert [float(x[0]) for x in first] == [1.0, 3.0, 2.0, 1.0, 0.0]
  endless = timestep_of([1.0, 2, 4, 8], [0, 0, 0, 0], [0, 0, 0, 1])
  assert [float(x[0]) for x in episode_stats.first_episode(endless)] == [
    1,
    15,
    4,
    1,
    1,
  ]


def scripted(reward_T, success_T):
  """An environment of given rewards and successes, the same in each row."""
  reward_T, success_T = jnp.asarray(reward_T), jnp.asarray(success_T)
  T = len(reward_T)

  def step(t_B, action_BA):
    del action_BA
    done_B = (t_B == T - 1).astype(float)
    timestep = env_lib.TimeStep(
      t_B, reward_T[t_B], 0 * done_B, done_B, t_B, success_T[t_B]
    )
    return (t_B + 1) % T, timestep

  return env_lib.Env(lambda seed_B: (0 * seed_B, seed_B), step, (), (), (), T)


@pytest.mark.parametrize('chunk', [1, 2, 3, 5, 7])
def test_an_episode_in_chunks_has_the_statistics_of_its_steps(chunk):
  """Success in the middle of a chunk, and not at the end of the episode."""
  env = scripted([1.0, 2.0, 4.0, 8.0, 16.0], [0.0, 1.0, 0.0, 0.0, 0.0])
  env = action_chunks.chunked(env, chunk, 0.5)
  state, steps = jnp.zeros(1, int), []
  for _ in range(env.horizon):
    state, timestep = env.step(state, jnp.zeros((1, chunk, 0)))
    steps.append(timestep)
  whole = jax.tree.map(lambda *x: jnp.stack(x, 1), *steps)
  _, ended = episode_stats.update(episode_stats.init(1), whole)
  first = episode_stats.first_episode(whole)
  # count, return, length, success once, success at the end
  assert [float(x[0]) for x in ended] == [1, 31, 5, 1, 0]
  assert [float(x[0]) for x in first] == [1, 31, 5, 1, 0]
  # The reward to learn from is discounted within the chunk.
  assert float(whole.reward[0, 0]) == sum(
    2.0**k * 0.5**k for k in range(min(chunk, 5))
  )
