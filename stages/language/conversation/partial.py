"""Conversations that continue over several training steps.

As `stages.language.partial_rollout` for completions: with more groups in flight
than a step learns from, a step need not wait for the conversations of the most
turns; with slots, nor for the slowest answers. Unfinished groups are carried to
the next step, between two turns, and go on with newer parameters.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from sharding import rules
import stages
from stages import base, ranges
from stages.language import policy_stages
from stages.language.conversation import conversation_state, episode
from stages.language.partial_rollout import carried as carried_lib


def partial_conversations(
  policy: base.Policy,
  group_size: int,
  *,
  converse: Callable[..., episode.Conversations] = episode.converse,
  max_carry: ranges.NonNegativeInt = 0,
  extra_groups: ranges.NonNegativeInt = 0,
) -> policy_stages.Rollouts:
  """Conversations that may take several steps, for `grpo(rollouts=…)`.

  A step ends as soon as it has as many finished groups as its batch has
  problems, the oldest first. It leaves other conversations between two turns,
  or, with slots, while they wait for an answer. Importance weights then correct
  for turns that older parameters took. The first step has nothing carried to
  learn from, and so `extra_groups` fewer groups; their rows are padding.

  Args:
    policy: the policy that generates.
    group_size: adjacent rows that share a prompt.
    converse: `converse` with its environments and limits.
    max_carry: steps for which an unfinished group may be carried; 0 to finish
      every group in its step.
    extra_groups: groups in flight beside those that a step learns from; with
      roles, a group has the rows of all of them. 0 without `max_carry`.

  Raises:
    ValueError: for one of the two alone, or for a policy that cannot continue
      completions.
  """
  carried_lib.check(policy, max_carry, extra_groups)
  if not max_carry:
    return policy_stages.complete(policy, group_size, converse=converse)
  play = converse(policy, 'generate', group_size=group_size)
  rows = max(1, len(play.cast.names)) * group_size
  append_stage = stages.Stage(
    functools.partial(_append, play), 'append_conversations', 'batch'
  )
  read_stage = stages.Stage(
    functools.partial(_read, play, extra_groups * rows),
    'read_carried',
    'batch',
    unbatched=(0,),
    rounds=policy.rounds,
  )
  enough = stages.Stage(
    functools.partial(_are_enough, rows, max_carry, extra_groups),
    'enough_are_over',
    'batch',
  )
  emit_stage = stages.Stage(
    functools.partial(_emit, play, rows, extra_groups), 'emit', 'batch'
  )
  measure = stages.Stage(carried_lib.carry_metrics, 'carry_metrics', 'batch')

  def body(carry, actors, problem, key_B, age_B):
    carry = play.take_turn(carry, actors, problem, key_B)
    return carry, enough(carry[0], age_B)

  def run(
    actor: base.Version,
    carried: carried_lib.Carried,
    problem: base.Problem,
    key_B,
  ):
    groups, key_B = append_stage(carried, problem, key_B)
    cache = ()
    if policy.out_shapes is None:  # An engine keeps what it has read itself.
      cache = read_stage(
        actor.params, groups.problem.prompt, key_B, groups.rows
      )
    loop = stages.Repeat(
      body, f'{play.name}_turns', *play.rounds(key_B.shape[0])
    )
    given = (actor,), groups.problem, key_B, groups.age
    now, _ = loop((groups.rows, (cache,)), *given)
    problem, x, carried = emit_stage(actor.step, groups, now)
    info = measure(x.version, x.mask, carried.rows.own)
    return problem, x, carried, info

  def allocate(problem: base.Problem) -> carried_lib.Carried:
    return _allocate(play, rows, extra_groups, problem)

  return policy_stages.Rollouts(run, allocate)


def _allocate(
  play: episode.Conversations,
  rows: int,
  extra_groups: int,
  problem: base.Problem,
) -> carried_lib.Carried:
  """Empty groups of conversations."""
  n, B = jax.tree.leaves(problem)[0].shape[0], extra_groups * rows
  prompt = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((B, *x.shape[1:]), x.dtype), problem.prompt
  )
  key_B = jax.random.split(jax.random.key(0), B)
  now = jax.eval_shape(play.begin, prompt, key_B)
  return carried_lib.allocate(
    problem,
    now,
    now.own.shape[1],
    groups=n * play.cast.group_size // rows,
    group_size=rows,
    extra_groups=extra_groups,
  )


def _append(
  play: episode.Conversations,
  carried: carried_lib.Carried,
  problem: base.Problem,
  key_B,
) -> tuple[carried_lib.Carried, base.Key]:
  """Carried groups, followed by new ones without tokens, and all keys."""
  new = play.begin(problem.prompt, key_B)
  groups = carried_lib.append(carried, problem, key_B, new)
  impl = jax.random.key_impl(key_B)
  return groups, jax.random.wrap_key_data(groups.key, impl=impl)


def _read(
  play: episode.Conversations,
  carried: int,
  params: base.Params,
  prompt: base.Prompt,
  key_B,
  now: conversation_state.Conversation,
) -> Any:
  """The cache of all rows, with the tokens of those that are carried.

  They are read as if these parameters had drawn them, so that later tokens are
  of one version alone.
  """
  (policy,) = play.policies
  T = now.own.shape[1]
  given = prompt, key_B, now.completions
  _, cache = policy.resume(
    params,
    *jax.tree.map(lambda x: x[:carried], given),
    group_size=rules.local_group(play.cast.group_size, carried),
    cache=policy.empty_cache(carried),
    max_unread=T,
    should_continue=lambda open_B: jnp.bool_(False),
  )
  empty = policy.empty_cache(key_B.shape[0] - carried)
  return jax.tree.map(lambda *x: jnp.concatenate(x), cache, empty)


def _are_enough(
  rows: int,
  max_carry: int,
  extra_groups: int,
  now: conversation_state.Conversation,
  age_B,
):
  """Whether a step has as many finished groups as it learns from."""
  goes_on = carried_lib.should_continue(age_B, rows, max_carry, extra_groups)
  return ~goes_on(conversation_state.is_open(now))


def _emit(
  play: episode.Conversations,
  rows: int,
  extra_groups: int,
  step,
  groups: carried_lib.Carried,
  now: conversation_state.Conversation,
) -> tuple[base.Problem, base.Experience, carried_lib.Carried]:
  """Separates finished groups from those that are carried.

  Args:
    play: the conversations.
    rows: rows of a group.
    extra_groups: groups to carry.
    step: version of the parameters that drew the new tokens.
    groups: all groups, as they were before.
    now: their conversations, as they are now.

  Returns:
    Problems with their episodes, and the experience, of finished groups; and
    the others for the next step.
  """
  done, rest, ended, _ = carried_lib.emit(
    groups,
    now,
    step,
    drawn_before_BT=groups.rows.completions.mask,
    open_B=conversation_state.is_open(now),
    group_size=rows,
    extra_groups=extra_groups,
  )
  drawn_B = (now.own - groups.rows.own).sum(1, dtype=jnp.int32)
  x, found = episode.finish((step,), done.problem, done.rows, play.cast)
  x = x._replace(version=done.version, arrival=drawn_B[ended])
  return done.problem._replace(answer=found), x, rest
