"""Statistics of episodes: success, return and length.

Rows are environments. Episodes that a failed simulator ended are not counted.
Chunks of actions count as their steps, so that an episode has the statistics
that it would have if its actions were taken one by one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base
from stages import metrics as metrics_lib
from stages.envs import env as env_lib


class Running(NamedTuple):
  """Statistics of each row's running episode.

  Attributes:
    return_: sum of rewards so far, undiscounted.
    length: steps so far.
    success: 1 once it has succeeded.
  """

  return_: Float[Array, ' B']
  length: Float[Array, ' B']
  success: Float[Array, ' B']


class EpisodeStats(NamedTuple):
  """Sums over each row's finished episodes.

  Attributes:
    count: finished episodes.
    return_: their returns.
    length: their steps.
    success_once: episodes that succeeded at some moment.
    success_at_end: episodes that were successful at their last step.
  """

  count: Float[Array, ' B']
  return_: Float[Array, ' B']
  length: Float[Array, ' B']
  success_once: Float[Array, ' B']
  success_at_end: Float[Array, ' B']


def init(B: int) -> Running:
  """Statistics before the first step of `B` rows."""
  return Running(*(jnp.zeros(B, float) for _ in Running._fields))


def update(
  running: Running, timestep: env_lib.TimeStep
) -> tuple[Running, EpisodeStats]:
  """Adds the steps of `timestep`, [B, T]; returns what finished in them."""
  zero = jnp.zeros_like(timestep.reward)
  time_major = jax.tree.map(
    lambda x: x.T,
    (
      _rewards(timestep),
      succeeded(timestep),
      timestep.success,
      jnp.maximum(timestep.terminated, timestep.truncated),
      zero + 1.0 if timestep.steps is None else timestep.steps,
      zero if timestep.env_failed is None else timestep.env_failed,
    ),
  )

  def add(carry, step):
    now, finished = carry
    reward, once, success, done, steps, env_failed = step
    now = Running(
      now.return_ + reward,
      now.length + steps,
      jnp.maximum(now.success, once),
    )
    counts = done * (1.0 - env_failed)
    last = EpisodeStats(jnp.ones_like(done), *now, success)
    finished = jax.tree.map(lambda x, y: x + counts * y, finished, last)
    return (jax.tree.map(lambda x: x * (1.0 - done), now), finished), None

  finished = EpisodeStats(*(zero[:, 0] for _ in EpisodeStats._fields))
  return jax.lax.scan(add, (running, finished), time_major)[0]


def in_first_episode(timestep: env_lib.TimeStep):
  """1 up to and including the last step of each row's first episode, [B, T]."""
  done_BT = jnp.maximum(timestep.terminated, timestep.truncated)
  before_BT = jnp.cumsum(done_BT, 1) - done_BT
  return (before_BT == 0).astype(done_BT.dtype)


def first_episode(timestep: env_lib.TimeStep) -> EpisodeStats:
  """Statistics of each row's first episode in [B, T], finished or not."""
  mask_BT = in_first_episode(timestep)
  last_BT = mask_BT * (1.0 - jnp.roll(mask_BT, -1, 1).at[:, -1].set(0.0))
  failed_BT = 0.0 if timestep.env_failed is None else timestep.env_failed
  kept_B = 1.0 - (mask_BT * failed_BT).max(1)
  steps_BT = mask_BT if timestep.steps is None else mask_BT * timestep.steps
  sums = EpisodeStats(
    jnp.ones_like(kept_B),
    (mask_BT * _rewards(timestep)).sum(1),
    steps_BT.sum(1),
    (mask_BT * succeeded(timestep)).max(1),
    (last_BT * timestep.success).sum(1),
  )
  return jax.tree.map(lambda x: kept_B * x, sums)


def _rewards(timestep: env_lib.TimeStep):
  """Sum of the rewards of all environment steps of each step."""
  if timestep.action_reward is None:
    return timestep.reward
  return timestep.action_reward.sum(-1)


def succeeded(timestep: env_lib.TimeStep):
  """1 where an environment step of a step succeeded."""
  if timestep.chunk_success is None:
    return timestep.success
  return timestep.chunk_success


def success(stats: EpisodeStats):
  """1 for an episode that succeeded at some moment, [B]."""
  return stats.success_once


def episode_return(stats: EpisodeStats):
  """The return of an episode, [B]."""
  return stats.return_


def metrics(stats: EpisodeStats, prefix: str) -> base.Info:
  """Means over episodes, named `prefix`/…."""
  count = stats.count.sum()

  def score(successes):
    # Each is 0 or 1, and so its own square.
    return metrics_lib.Score(successes.sum(), successes.sum(), count)

  def mean(x):
    return metrics_lib.OptionalMean(x.sum(), count)

  return {
    f'{prefix}/success_once': score(stats.success_once),
    f'{prefix}/success_at_end': score(stats.success_at_end),
    f'{prefix}/return': mean(stats.return_),
    f'{prefix}/episode_length': mean(stats.length),
  }


def failures(timestep: env_lib.TimeStep) -> base.Info:
  """Number of episodes that simulators failed in; {} where none can fail."""
  if timestep.env_failed is None:
    return {}
  return {'env/failed': timestep.env_failed.sum()}
