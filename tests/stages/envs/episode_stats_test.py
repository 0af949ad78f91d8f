"""Episodes are counted when they end."""

import jax
import jax.numpy as jnp
import numpy as np

from stages.envs import env as env_lib
from stages.envs import episode_stats


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
