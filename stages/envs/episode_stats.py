"""How episodes went: whether they succeeded, what they returned, how long."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base
from stages import metrics as metrics_lib


class Running(NamedTuple):
  """Of every row, the episode that has not ended yet.

  Attributes:
    return_: rewards so far.
    length: steps so far.
    success: one once it has succeeded.
  """

  return_: Float[Array, ' B']
  length: Float[Array, ' B']
  success: Float[Array, ' B']


class EpisodeStats(NamedTuple):
  """Of every row, sums over the episodes that have ended.

  Attributes:
    count: how many.
    return_: their rewards.
    length: their steps.
    success_once: those that succeeded at some moment.
    success_at_end: those that had when they ended.
  """

  count: Float[Array, ' B']
  return_: Float[Array, ' B']
  length: Float[Array, ' B']
  success_once: Float[Array, ' B']
  success_at_end: Float[Array, ' B']


def init(B: int) -> Running:
  """Nothing has happened in any of `B` rows."""
  return Running(*(jnp.zeros(B, float) for _ in Running._fields))


def update(
  running: Running, timestep: base.TimeStep
) -> tuple[Running, EpisodeStats]:
  """Goes on with episodes for the steps of `timestep`, [B, T].

  An episode that a simulator has lost is not counted.
  """
  none = jnp.zeros_like(timestep.reward)
  time_major = jax.tree.map(
    lambda x: x.T,
    (
      timestep.reward,
      timestep.success,
      jnp.maximum(timestep.terminated, timestep.truncated),
      none + 1.0 if timestep.steps is None else timestep.steps,
      none if timestep.env_failed is None else timestep.env_failed,
    ),
  )

  def one(carry, step):
    now, ended = carry
    reward, success, done, steps, lost = step
    now = Running(
      now.return_ + reward,
      now.length + steps,
      jnp.maximum(now.success, success),
    )
    counts = done * (1.0 - lost)
    last = EpisodeStats(jnp.ones_like(done), *now, success)
    ended = jax.tree.map(lambda x, y: x + counts * y, ended, last)
    return (jax.tree.map(lambda x: x * (1.0 - done), now), ended), None

  zero = EpisodeStats(*(none[:, 0] for _ in EpisodeStats._fields))
  return jax.lax.scan(one, (running, zero), time_major)[0]


def in_first_episode(timestep: base.TimeStep):
  """One up to the end of each row's first episode, that step included."""
  done_BT = jnp.maximum(timestep.terminated, timestep.truncated)
  before_BT = jnp.cumsum(done_BT, 1) - done_BT
  return (before_BT == 0).astype(done_BT.dtype)


def first_episode(timestep: base.TimeStep) -> EpisodeStats:
  """The first episode of each row of [B, T], ended or not."""
  alive_BT = in_first_episode(timestep)
  last_BT = alive_BT * (1.0 - jnp.roll(alive_BT, -1, 1).at[:, -1].set(0.0))
  lost_BT = 0.0 if timestep.env_failed is None else timestep.env_failed
  kept_B = 1.0 - (alive_BT * lost_BT).max(1)
  steps_BT = alive_BT if timestep.steps is None else alive_BT * timestep.steps
  sums = EpisodeStats(
    jnp.ones_like(kept_B),
    (alive_BT * timestep.reward).sum(1),
    steps_BT.sum(1),
    (alive_BT * timestep.success).max(1),
    (last_BT * timestep.success).sum(1),
  )
  return jax.tree.map(lambda x: kept_B * x, sums)


def success(ended: EpisodeStats):
  """One for an episode that succeeded at some moment, [B]."""
  return ended.success_once


def episode_return(ended: EpisodeStats):
  """The rewards of an episode, [B]."""
  return ended.return_


def metrics(ended: EpisodeStats, prefix: str) -> base.Info:
  """Means over episodes, by name."""
  count = ended.count.sum()
  return {
    f'{prefix}/{name}': metrics_lib.OptionalMean(
      getattr(ended, field).sum(), count
    )
    for name, field in (
      ('success_once', 'success_once'),
      ('success_at_end', 'success_at_end'),
      ('return', 'return_'),
      ('episode_length', 'length'),
    )
  }


def failures(timestep: base.TimeStep) -> base.Info:
  """How many episodes were lost; nothing where none can be."""
  return (
    {}
    if timestep.env_failed is None
    else {'env/failed': timestep.env_failed.sum()}
  )
