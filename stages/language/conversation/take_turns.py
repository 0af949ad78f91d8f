"""Policies take their turns in conversations, in JAX or by an engine."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sharding import rules
import stages
from stages import base
from stages.language import policy_stages
from stages.language.conversation import conversation_state
from stages.language.conversation import roles as roles_lib

# With slots, decoding goes on with 1 / SHARE of the unfinished rows, and an
# engine passes on turns once 1 / SHARE of those under way have ended.
SHARE = 4


def turns(
  policy: base.Policy,
  name: str,
  *,
  cast: roles_lib.Cast,
  role: int | None,
  group_size: int,
  greedy: bool,
  max_unread: int,
  slots: int | None,
  expected_rounds: int,
) -> Callable:
  """Returns `Version, prompt, keys, Conversation, cache -> the last two`.

  It continues rows in which the policy has the turn, up to its end. With a
  role, they are the rows of that role.

  An engine continues all of them. With slots, it passes on those that have
  ended their turn once enough have; the others are returned as they were, and
  go on meanwhile.

  Args:
    policy: the policy. The stage is a host stage if an engine outside JAX acts.
    name: name of the stage.
    cast: the roles.
    role: number of the role of the policy; None for all.
    group_size: adjacent rows of a group.
    greedy: whether to take the likeliest tokens.
    max_unread: most tokens of an answer.
    slots: as in `conversation.TextEnvs`.
    expected_rounds: rounds that planners count on.
  """
  settings = {'cast': cast, 'role': role, 'greedy': greedy, 'slots': slots}
  if policy.out_shapes is None:
    return stages.Stage(
      functools.partial(_in_jax, policy, max_unread=max_unread, **settings),
      name,
      unbatched=(0,),
      group_size=group_size,
      divisible_groups=not cast.names,
      rounds=policy_stages.rounds(policy),
    )
  by_engine = stages.Stage(
    functools.partial(_by_engine, policy, **settings),
    name,
    unbatched=(0,),
    group_size=group_size,
    host=True,
    out_shapes=lambda actor, prompt, key_B, now: now,
    asynchronous=True,
    engine=_engine(policy, cast, greedy, expected_rounds),
    rounds=policy_stages.rounds(policy),
  )

  def run(actor: base.Version, prompt: base.Prompt, key_B, now, cache):
    return by_engine(actor, prompt, key_B, now), cache

  return run


def _in_jax(
  policy: base.Policy,
  actor: base.Version,
  prompt: base.Prompt,
  key_B,
  now: conversation_state.Conversation,
  cache: Any,
  *,
  cast: roles_lib.Cast,
  role: int | None,
  greedy: bool,
  max_unread: int,
  slots: int | None,
) -> tuple[conversation_state.Conversation, Any]:
  """Continues rows; with slots, so many of them, of the fewest turns first."""
  old = _own_turns(cast, role, now.completions)
  row_M = _next_rows(slots, old, now.turns)
  given = prompt, key_B, old, cache
  group_size = rules.local_group(cast.group_size, key_B.shape[0])
  if row_M is not None:
    given = jax.tree.map(lambda x: x[row_M], given)
    group_size = 1  # Rows of a group may be in different rounds.
  *given, kept = given
  new = policy.resume(
    actor.params,
    *given,
    group_size=group_size,
    greedy=greedy,
    cache=kept,
    max_unread=max_unread,
  )
  if row_M is not None:
    put = lambda x, some: x.at[row_M].set(some)
    new = jax.tree.map(put, (old, cache), new)
  new, cache = new
  return _ended(now, old, new), cache


def _by_engine(
  policy: base.Policy,
  actor: base.Version,
  prompt: base.Prompt,
  key_B,
  now: conversation_state.Conversation,
  *,
  cast: roles_lib.Cast,
  role: int | None,
  greedy: bool,
  slots: int | None,
) -> stages.Deferred:
  """Continues rows with an engine, which keeps what it has read of them."""
  old = jax.device_get(_own_turns(cast, role, now.completions))
  started = int(conversation_state.has_turn(old).sum())
  most_left = 0 if slots is None else started - -(-started // SHARE)
  new = policy.resume(
    actor.params,
    prompt,
    key_B,
    old,
    group_size=cast.group_size,
    greedy=greedy,
    should_continue=lambda open_B: open_B.sum() > most_left,
    in_background=True,
  )
  return stages.Deferred(new, functools.partial(_ended, now, old))


def _own_turns(
  cast: roles_lib.Cast, role: int | None, completions: base.Completions
) -> base.Completions:
  """Completions in which only rows of a role are alive; of all if None."""
  if role is None:
    return completions
  own_B = roles_lib.role_of_row(cast, completions.alive.shape[0]) == role
  return completions._replace(alive=completions.alive & own_B)


def _ended(
  now: conversation_state.Conversation,
  old: base.Completions,
  new: base.Completions,
) -> conversation_state.Conversation:
  """The conversations, of which some rows were continued from `old`."""
  others_B = now.completions.alive & ~old.alive
  return now._replace(
    completions=new._replace(alive=new.alive | others_B),
    own=now.own + new.mask - old.mask,
    waits=now.waits | (old.alive & ~new.alive),
  )


def _next_rows(
  slots: int | None, old: base.Completions, turns_B
) -> Int[Array, ' M'] | None:
  """Rows to continue, those with the fewest turns first; None for all."""
  if slots is None or slots >= turns_B.shape[0]:
    return None
  last = jnp.iinfo(jnp.int32).max
  turns_B = jnp.where(conversation_state.has_turn(old), turns_B, last)
  return jnp.argsort(turns_B, stable=True)[:slots]


def _engine(
  policy: base.Policy, cast: roles_lib.Cast, greedy: bool, rounds: int
):
  """The cost of an engine's turns; None if the engine has none."""
  if policy.engine is None:
    return None

  def equivalent(actor: base.Version, prompt: base.Prompt, key_B, now):
    x = policy.engine.equivalent(
      actor.params, prompt, key_B, group_size=cast.group_size, greedy=greedy
    )
    alive_B = x.truncated > 0
    new = base.Completions(x.action, x.logp, x.mask, alive_B)
    return _ended(now, now.completions, new)

  return policy.engine._replace(equivalent=equivalent, calls=rounds)
