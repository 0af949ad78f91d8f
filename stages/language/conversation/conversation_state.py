"""Conversations under way, and what an answer of an environment does to them.

A row is in one of four states: the policy has the turn (`has_turn`); it has
ended a turn, and waits for the answer; it waits while another role of its
episode has the turn (`idle`); or it is over.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from stages import base


class Conversation(NamedTuple):
  """Conversations under way.

  Attributes:
    id: bits of the key of each row, or of the first role's row of its episode,
      by which environments are found again.
    completions: all tokens so far, of the policy and of the environment; a row
      is alive while the policy has the turn.
    own: 1 on the tokens of the policy.
    waits: rows that have ended a turn, which the environment has not answered,
      or that are idle.
    idle: rows that wait for a turn of another role.
    turns: turns of the policy that the environment has received.
    by_turn: rewards of turns, and the states that they were taken in.
    terms: sums of the environment's numbers so far, by name.
    truncated: 1 where the environment ended the row, or its answer has no room.
    failed: 1 where the environment failed.
  """

  id: UInt32[Array, 'B n']
  completions: base.Completions
  own: Float[Array, 'B T']
  waits: Bool[Array, ' B']
  idle: Bool[Array, ' B']
  turns: Int[Array, ' B']
  by_turn: base.Turns
  terms: Mapping[str, Float[Array, ' B']]
  truncated: Float[Array, ' B']
  failed: Float[Array, ' B']


class Reply(NamedTuple):
  """Answers of environments to turns; arbitrary in rows that do not wait.

  Attributes:
    answered: 1 where there is an answer; the other rows go on waiting.
    holds: 1 where another role has the next turn; such a row becomes idle.
    token: tokens of the answer, up to where the policy continues; padded on the
      right.
    mask: 1 on real tokens. Without any, an answer has no room.
    reward: reward of the turn, or added to that of the last turn in idle rows.
    terminated: 1 where the episode has ended.
    truncated: 1 where something else ended it, such as a time limit.
    failed: 1 where the environment raised or took too long.
    terms: numbers of the turn to log, by name.
    state: number of the state that the answer leads to, as in `base.Turns`.
  """

  answered: Float[Array, ' B']
  holds: Float[Array, ' B']
  token: Int[Array, 'B E']
  mask: Int[Array, 'B E']
  reward: Float[Array, ' B']
  terminated: Float[Array, ' B']
  truncated: Float[Array, ' B']
  failed: Float[Array, ' B']
  terms: Mapping[str, Float[Array, ' B']]
  state: Int[Array, ' B']


def has_turn(completions: base.Completions) -> Bool[Array, ' B']:
  """Rows in which the policy has the turn, and room for a token."""
  return completions.alive & (completions.mask.min(1) == 0)


def fits(mask_BT, said_B, turns_B, max_turns: int):
  """Rows in which the policy may have another turn after an answer.

  Args:
    mask_BT: tokens of the conversation before the answer.
    said_B: tokens of the answer; none where it was too long.
    turns_B: turns that the policy has had.
    max_turns: most turns of a conversation.

  Returns:
    Booleans [B], of JAX or of NumPy as the arguments are.
  """
  has_room_B = (said_B > 0) & (mask_BT.sum(1) + said_B < mask_BT.shape[1])
  return has_room_B & (turns_B < max_turns)


def append(now: Conversation, reply: Reply) -> Conversation:
  """Adds what environments said to the rows that waited for it.

  A row goes on if it has had less than K turns, and its answer leaves room for
  a token of the policy. One that is idle has not said anything since its last
  turn, so that none is counted.
  """
  old, waits_B = now.completions, now.waits & (reply.answered > 0)
  (B, E), T = reply.mask.shape, old.mask.shape[1]
  length_B = old.mask.sum(1, dtype=jnp.int32)
  said_B = reply.mask.sum(1, dtype=jnp.int32)
  ends_B = (reply.terminated + reply.truncated + reply.failed) > 0
  reward_BK, state_BK = now.by_turn
  K = reward_BK.shape[1]
  turns_B = now.turns + (waits_B & ~now.idle)
  fits_B = fits(old.mask, said_B, turns_B, K)
  holds_B = waits_B & ~ends_B & (reply.holds > 0)
  goes_on_B = waits_B & ~ends_B & ~holds_B & fits_B
  column_BE = length_B[:, None] + jnp.arange(E)[None]
  column_BE = jnp.where((reply.mask > 0) & goes_on_B[:, None], column_BE, T)
  row_B1 = jnp.arange(B)[:, None]

  def put(x_BT, x):
    return x_BT.at[row_B1, column_BE].set(x, mode='drop')

  def heard(x_B):
    return jnp.where(waits_B, x_B, 0)

  cut_B = waits_B & ~ends_B & ~holds_B & ~fits_B
  turn_BK = jnp.arange(K)[None] - turns_B[:, None]
  last_B1 = jnp.where(turns_B > 0, -1, 0)[:, None]
  is_last_BK = (turn_BK == last_B1) & waits_B[:, None]
  is_next_BK = (turn_BK == 0) & goes_on_B[:, None]
  return now._replace(
    completions=old._replace(
      action=put(old.action, reply.token),
      mask=put(old.mask, 1.0),
      alive=old.alive | goes_on_B,
    ),
    waits=(now.waits & ~waits_B) | holds_B,
    idle=(now.idle & ~waits_B) | holds_B,
    turns=turns_B,
    by_turn=base.Turns(
      reward_BK + jnp.where(is_last_BK, reply.reward[:, None], 0.0),
      jnp.where(is_next_BK, reply.state[:, None], state_BK),
    ),
    terms={k: x_B + heard(reply.terms[k]) for k, x_B in now.terms.items()},
    truncated=now.truncated + heard(reply.truncated) + cut_B,
    failed=now.failed + heard(reply.failed),
  )


def is_open(now: Conversation) -> Bool[Array, ' B']:
  """Rows in which the policy has the turn, or that wait."""
  return has_turn(now.completions) | now.waits


def is_over(now: Conversation) -> Bool[Array, '']:
  """Whether no row is open."""
  return ~is_open(now).any()
