"""Conversations that continue over several training steps.

As `stages.language.partial_rollout` for completions: with more groups in flight
than a step learns from, a step need not wait for the conversations of the most
turns; with slots, nor for the slowest answers. Unfinished groups are carried to
the next step, between two turns, and go on with newer parameters.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sharding import rules
import stages
from stages import base, ranges
from stages.language import partial_rollout, policy_stages
from stages.language.conversation import conversation_state, episode


class Carried(NamedTuple):
  """Groups of unfinished conversations, the oldest first.

  A group is empty before the first step: its `age` is 0.

  Attributes:
    problem: the problems of the rows.
    key: key data of each row, which a checkpoint can store.
    now: the conversations.
    version: optimizer steps that the parameters had seen which drew each token.
    age: steps since the row was started.
  """

  problem: base.Problem
  key: Array
  now: conversation_state.Conversation
  version: Int[Array, 'B T']
  age: Int[Array, ' B']


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
  partial_rollout.check(policy, max_carry, extra_groups)
  if not max_carry:
    return policy_stages.complete(policy, group_size, converse=converse)
  play = converse(policy, 'generate', group_size=group_size)
  rows = max(1, len(play.cast.names)) * group_size
  with_proximal = policy_stages.proximal_logp(policy, group_size, several=True)
  append_stage = stages.Stage(
    functools.partial(_append, play), 'append_conversations', 'batch'
  )
  read_stage = stages.Stage(
    functools.partial(_read, play, extra_groups * rows),
    'read_carried',
    'batch',
    unbatched=(0,),
  )
  enough = stages.Stage(
    functools.partial(_are_enough, rows, max_carry, extra_groups),
    'enough_are_over',
    'batch',
  )
  emit_stage = stages.Stage(
    functools.partial(_emit, play, rows, extra_groups), 'emit', 'batch'
  )
  measure = stages.Stage(
    partial_rollout.carry_metrics, 'carry_metrics', 'batch'
  )

  def body(carry, actors, problem, key_B, age_B):
    carry = play.take_turn(carry, actors, problem, key_B)
    return carry, enough(carry[0], age_B)

  def run(actor: base.Version, carried: Carried, problem: base.Problem, key_B):
    groups, key_B = append_stage(carried, problem, key_B)
    cache = ()
    if policy.out_shapes is None:  # An engine keeps what it has read itself.
      cache = read_stage(actor.params, groups.problem.prompt, key_B, groups.now)
    loop = stages.Repeat(
      body, f'{play.name}_turns', *play.rounds(key_B.shape[0])
    )
    given = (actor,), groups.problem, key_B, groups.age
    now, _ = loop((groups.now, (cache,)), *given)
    problem, x, carried = emit_stage(actor.step, groups, now)
    info = measure(x.version, x.mask, carried.now.own)
    return problem, with_proximal(actor, x), carried, info

  def allocate(problem: base.Problem) -> Carried:
    return _allocate(play, rows, extra_groups, problem)

  return policy_stages.Rollouts(run, allocate)


def _allocate(
  play: episode.Conversations,
  rows: int,
  extra_groups: int,
  problem: base.Problem,
) -> Carried:
  """Empty groups, which count as finished in the first step."""
  groups = jax.tree.leaves(problem)[0].shape[0] * play.cast.group_size // rows
  partial_rollout.check_extra(extra_groups, groups)
  B = extra_groups * rows
  key_B = jax.random.split(jax.random.key(0), B)

  def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros((B, *x.shape[1:]), x.dtype), tree)

  problem = zeros(problem)
  now = zeros(jax.eval_shape(play.begin, problem.prompt, key_B))
  return Carried(
    problem=problem,
    key=zeros(jax.random.key_data(key_B)),
    now=now,
    version=jnp.zeros(now.own.shape, jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )


def _append(
  play: episode.Conversations, carried: Carried, problem: base.Problem, key_B
) -> tuple[Carried, base.Key]:
  """Carried groups, followed by new ones without tokens, and all keys."""
  B = key_B.shape[0]
  now = play.begin(problem.prompt, key_B)
  new = Carried(
    problem=problem,
    key=jax.random.key_data(key_B),
    now=now,
    version=jnp.zeros(now.own.shape, jnp.int32),
    age=jnp.zeros(B, jnp.int32),
  )

  def fill(old, new):
    """A real prompt for empty groups: a policy may return NaN without."""
    empty = (carried.age == 0).reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(empty, new[:1], old)

  filled = jax.tree.map(fill, carried.problem, problem)
  carried = carried._replace(problem=filled)
  groups = jax.tree.map(lambda *x: jnp.concatenate(x), carried, new)
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
  goes_on = partial_rollout.should_continue(
    age_B, rows, max_carry, extra_groups
  )
  return ~goes_on(conversation_state.is_open(now))


def _emit(
  play: episode.Conversations,
  rows: int,
  extra_groups: int,
  step,
  groups: Carried,
  now: conversation_state.Conversation,
) -> tuple[base.Problem, base.Experience, Carried]:
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
  old = groups.now
  groups = groups._replace(
    now=now,
    version=jnp.where(old.completions.mask > 0, groups.version, step),
    age=groups.age + 1,
  )
  drawn_B = (now.own - old.own).sum(1, dtype=jnp.int32)
  n = groups.age.shape[0] // rows - extra_groups
  open_B = conversation_state.is_open(now)
  ended, left = partial_rollout.split_finished(open_B, rows, n)
  done = jax.tree.map(lambda x: x[ended], groups)
  rest = jax.tree.map(lambda x: x[left], groups)
  x, found = episode.finish((step,), done.problem, done.now, play.cast)
  x = x._replace(version=done.version, arrival=drawn_B[ended])
  return done.problem._replace(answer=found), x, rest
