"""How episodes went: whether they succeeded, what they returned, how long."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base, metrics


class Open(NamedTuple):
  """Of every row, the episode that has not ended yet.

  Attributes:
    return_: rewards so far.
    length: steps so far.
    success: one once it has succeeded.
  """

  return_: Float[Array, ' B']
  length: Float[Array, ' B']
  success: Float[Array, ' B']


class Ended(NamedTuple):
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


def begin(B: int) -> Open:
  """Nothing has happened in any of `B` rows."""
  return Open(*(jnp.zeros(B, float) for _ in Open._fields))


def count(open_: Open, outcome: base.TimeStep) -> tuple[Open, Ended]:
  """Goes on with episodes for the steps of `outcome`, [B, T].

  An episode that a simulator has lost is not counted.
  """
  none = jnp.zeros_like(outcome.reward)
  time_major = jax.tree.map(
    lambda x: x.T,
    (
      outcome.reward,
      outcome.success,
      jnp.maximum(outcome.terminated, outcome.truncated),
      none + 1.0 if outcome.steps is None else outcome.steps,
      none if outcome.lost is None else outcome.lost,
    ),
  )

  def one(carry, step):
    now, ended = carry
    reward, success, done, steps, lost = step
    now = Open(
      now.return_ + reward,
      now.length + steps,
      jnp.maximum(now.success, success),
    )
    counts = done * (1.0 - lost)
    last = Ended(jnp.ones_like(done), *now, success)
    ended = jax.tree.map(lambda x, y: x + counts * y, ended, last)
    return (jax.tree.map(lambda x: x * (1.0 - done), now), ended), None

  zero = Ended(*(none[:, 0] for _ in Ended._fields))
  return jax.lax.scan(one, (open_, zero), time_major)[0]


def alive(outcome: base.TimeStep):
  """One up to the end of each row's first episode, that step included."""
  done_BT = jnp.maximum(outcome.terminated, outcome.truncated)
  before_BT = jnp.cumsum(done_BT, 1) - done_BT
  return (before_BT == 0).astype(done_BT.dtype)


def first(outcome: base.TimeStep) -> Ended:
  """The first episode of each row of [B, T], ended or not."""
  alive_BT = alive(outcome)
  last_BT = alive_BT * (1.0 - jnp.roll(alive_BT, -1, 1).at[:, -1].set(0.0))
  lost_BT = 0.0 if outcome.lost is None else outcome.lost
  kept_B = 1.0 - (alive_BT * lost_BT).max(1)
  steps_BT = alive_BT if outcome.steps is None else alive_BT * outcome.steps
  sums = Ended(
    jnp.ones_like(kept_B),
    (alive_BT * outcome.reward).sum(1),
    steps_BT.sum(1),
    (alive_BT * outcome.success).max(1),
    (last_BT * outcome.success).sum(1),
  )
  return jax.tree.map(lambda x: kept_B * x, sums)


def succeeded(ended: Ended):
  """One for an episode that succeeded at some moment, [B]."""
  return ended.success_once


def returned(ended: Ended):
  """The rewards of an episode, [B]."""
  return ended.return_


def told(ended: Ended, prefix: str) -> base.Info:
  """Means over episodes, by name."""
  count = ended.count.sum()
  return {
    f'{prefix}/{name}': metrics.Rare(getattr(ended, field).sum(), count)
    for name, field in (
      ('success_once', 'success_once'),
      ('success_at_end', 'success_at_end'),
      ('return', 'return_'),
      ('episode_length', 'length'),
    )
  }


def faults(outcome: base.TimeStep) -> base.Info:
  """How many episodes were lost; nothing where none can be."""
  return {} if outcome.lost is None else {'env/lost': outcome.lost.sum()}
