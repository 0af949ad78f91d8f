"""Conversations: a policy and a text environment take turns in one row.

A row starts with a prompt. The policy generates until it ends its turn with an
end token. A host stage gives the turn to the row's environment, whose answer is
tokenized once and appended, and the policy continues after it. All tokens of a
conversation are one completion, so a forward pass scores it as any other; the
mask is 1 on the policy's own tokens and 0 on those of the environment.

With slots, only some of the rows that have the turn are continued at once, each
to the end of its turn, and the environments of the others work meanwhile. When
the answer to a row comes then changes none of its tokens.

An episode may have several roles, such as a solver and a critic. Each is a row
of its own, with its own prompt, and the environment says which of them has the
next turn; the others wait. See `stages.language.conversation.roles`.

What the policy wrote is never tokenized again: the tokens that are trained on
are the tokens that were sampled.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import stages
from stages import base, ranges
from stages.language.conversation import conversation_state, take_turns
from stages.language.conversation import roles as roles_lib


class TextEnvs(NamedTuple):
  """Text environments of a batch of rows, as `rlinf_jax.agents` makes them.

  Attributes:
    reply: host stage `answer, Conversation -> Reply`, as in
      `conversation_state`, where `answer` is that of the problem.
    max_answer_tokens: tokens that an answer has room for.
    terms: names of the numbers that they log.
    slots: rows that the policy continues at once; None for all, and `reply`
      then answers all that wait. An engine continues all in any case, and with
      slots, those that have an answer do not wait for the others.
    roles: names of the roles of an episode, of which the first has the first
      turn; () where the policy has one role.
  """

  reply: stages.Stage
  max_answer_tokens: int
  terms: tuple[str, ...] = ()
  slots: int | None = None
  roles: tuple[str, ...] = ()


class Episode(NamedTuple):
  """Finished conversations with what their environments gave them.

  Takes the place of the answer of a problem, so that `episode_return` reads it.

  Attributes:
    answer: the answer of the problem.
    reward: sum of the rewards.
    truncated: 1 where a limit ended the conversation.
    terms: numbers to log, by name.
    turns: rewards and states by turn; None where they are not known.
  """

  answer: Any
  reward: Float[Array, ' B']
  truncated: Float[Array, ' B']
  terms: Mapping[str, Float[Array, ' B']]
  turns: base.Turns | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Conversations:
  """Conversations over many turns: `Version, problem, keys -> problem, x`.

  With a policy for each role, a call takes a Version of each.

  Attributes:
    name: name of the stages that generate.
    policies: one for all roles, or one for each.
    is_shared: whether a Version, rather than one for each role, is given.
    cast: the roles, with the rows of each group.
    begin: `prompt, keys -> Conversation` without a token.
    take_turn: `carry, Versions, problem, keys -> carry`, of stages, where the
      carry is a Conversation and the cache of each policy.
    rounds: `rows -> (at most, expected)` calls of `take_turn`.
  """

  name: str
  policies: tuple[base.Policy, ...]
  is_shared: bool
  cast: roles_lib.Cast
  begin: Callable
  take_turn: Callable
  rounds: Callable[[int], tuple[int, int]]

  def __call__(self, actor, problem: base.Problem, key_B):
    """Plays all conversations of a batch to their ends."""
    begin = stages.Stage(
      self._begin, 'begin_conversation', group_size=self.cast.rows
    )
    over = stages.Stage(conversation_state.is_over, 'is_over', 'batch')
    end = stages.Stage(
      functools.partial(finish, cast=self.cast),
      'end_conversation',
      unbatched=(0,),
      group_size=self.cast.rows,
    )

    def body(carry, *given):
      carry = self.take_turn(carry, *given)
      return carry, over(carry[0])

    actors = (actor,) if self.is_shared else tuple(actor)
    loop = stages.Repeat(
      body, f'{self.name}_turns', *self.rounds(key_B.shape[0])
    )
    carry = begin(problem.prompt, key_B)
    now, _ = loop(carry, actors, problem, key_B)
    steps = tuple(actor.step for actor in actors)
    x, episode = end(steps, problem, now)
    return problem._replace(answer=episode), x

  def empty_caches(self, rows: int) -> tuple[Any, ...]:
    """The empty cache of each policy; () for an engine's."""
    return tuple(
      policy.empty_cache(rows) if policy.out_shapes is None else ()
      for policy in self.policies
    )

  def _begin(self, prompt: base.Prompt, key_B):
    return self.begin(prompt, key_B), self.empty_caches(key_B.shape[0])


def converse(
  policy: base.Policy | Sequence[base.Policy],
  name: str,
  *,
  group_size: int = 1,
  greedy: bool = False,
  envs: TextEnvs,
  max_turns: ranges.PositiveInt,
  expected_turns: ranges.PositiveInt | None = None,
  learned: Sequence[str] | None = None,
) -> Conversations:
  """Returns `Version, problem, keys -> problem, Experience` over many turns.

  The problem that it returns has an `Episode` as its answer. A row ends when
  its environment ends it, when it has as many tokens as a completion of the
  policy may have, or after `max_turns` turns; the last two count as truncated.

  Token t of a row, counted over all of its turns, is drawn with
  `fold_in(key, t)`, so that no plan changes it, nor when answers come. Keys and
  values of a conversation are kept between its turns, and those of prompts, one
  for each group, or for each row in a slot, are computed in every round. An
  engine outside JAX seeds each turn by the key and the tokens before it, and
  keeps keys and values as it is set up to.

  Args:
    policy: the language model; its `response_length` is for all turns together,
      what the environment says included. Or one for each role of the
      environments, all of one tokenizer: `run` then takes a Version of each.
    name: name of the stage that generates.
    group_size: adjacent rows that share a prompt.
    greedy: whether to take the likeliest tokens.
    envs: the environments.
    max_turns: turns of the policy in a row.
    expected_turns: turns that planners count on, at most `max_turns`, which it
      is if None.
    learned: names of the roles whose tokens are learned; None for all. The mask
      of the others is 0.

  Raises:
    ValueError: for a policy that cannot continue completions, or for `learned`
      that are no roles of the environments.
  """
  is_shared = isinstance(policy, base.Policy)
  policies = (policy,) if is_shared else tuple(policy)
  _check(policies, envs)
  expected_turns = min(expected_turns or max_turns, max_turns)
  in_slots = any(policy.out_shapes is None for policy in policies)
  cast = roles_lib.cast(envs.roles, group_size, learned)
  reply = envs.reply
  if envs.roles:
    reply = dataclasses.replace(reply, group_size=cast.rows)
  generates = [
    take_turns.turns(
      policy,
      name if is_shared else f'{envs.roles[i]}_{name}',
      cast=cast,
      role=None if is_shared else i,
      group_size=group_size if is_shared else cast.rows,
      greedy=greedy,
      max_unread=envs.max_answer_tokens,
      slots=envs.slots,
      expected_rounds=max(1, len(envs.roles)) * expected_turns,
    )
    for i, policy in enumerate(policies)
  ]
  append_stage = stages.Stage(conversation_state.append, 'append_reply')

  def take_turn(carry, actors, problem: base.Problem, key_B):
    now, caches = carry[0], []
    for generate, actor, cache in zip(generates, actors, carry[1], strict=True):
      now, cache = generate(actor, problem.prompt, key_B, now, cache)
      caches.append(cache)
    now = append_stage(now, reply(problem.answer, now))
    return now, tuple(caches)

  return Conversations(
    name,
    policies,
    is_shared,
    cast,
    functools.partial(_begin, policies, envs.terms, max_turns, cast),
    take_turn,
    lambda B: _rounds(B, envs, max_turns, expected_turns, in_slots),
  )


def _check(policies: Sequence[base.Policy], envs: TextEnvs):
  """Raises for policies that cannot converse, or too few of them."""
  if not all(x.can_take_turns for x in policies):
    raise ValueError(
      'A conversation continues after each answer, and this policy cannot '
      'continue a completion: leave out its slots (environments have slots of '
      'their own) and replay_routing, and use a language model that reads text '
      'alone.'
    )
  if len(policies) not in (1, len(envs.roles)):
    raise ValueError(
      f'There are {len(policies)} policies, and the environment has the roles '
      f'{[*envs.roles]}: give one policy for all of them, or one for each.'
    )


def _rounds(
  B: int, envs: TextEnvs, max_turns: int, expected_turns: int, in_slots: bool
) -> tuple[int, int]:
  """Rounds of a loop of turns: at most, and as planners count on.

  An engine decodes the rows of all slots together.
  """
  R = max(1, len(envs.roles))
  # One more tells the other roles that a limit has ended their episode.
  most, expected = R * max_turns + (R > 1), R * expected_turns
  if envs.slots is None:
    return most, expected
  # Each round has a turn or an answer of one row at least.
  return 2 * B * most, expected * (-(-B // envs.slots) if in_slots else 1)


def _begin(
  policies: Sequence[base.Policy],
  terms: tuple[str, ...],
  max_turns: int,
  cast: roles_lib.Cast,
  prompt: base.Prompt,
  key_B,
) -> conversation_state.Conversation:
  """Conversations without a token."""
  policy = policies[0]
  params = jax.eval_shape(policy.init, key_B[0])
  act = policy.out_shapes or functools.partial(jax.eval_shape, policy.act)
  x = act(params, prompt, key_B)
  B = key_B.shape[0]
  zero_B = jnp.zeros(B, jnp.float32)
  idle_B = roles_lib.role_of_row(cast, B) > 0

  def zeros(x):
    return jnp.zeros(x.shape, x.dtype)

  return conversation_state.Conversation(
    id=roles_lib.of_role(cast, 0, jax.random.key_data(key_B)),
    completions=base.Completions(
      zeros(x.action), zeros(x.logp), zeros(x.mask), ~idle_B
    ),
    own=zeros(x.mask),
    waits=idle_B,
    idle=idle_B,
    turns=jnp.zeros(B, jnp.int32),
    by_turn=base.Turns(
      jnp.zeros((B, max_turns)), jnp.zeros((B, max_turns), jnp.int32)
    ),
    terms=dict.fromkeys(terms, zero_B),
    truncated=zero_B,
    failed=zero_B,
  )


def finish(
  steps: tuple,
  problem: base.Problem,
  now: conversation_state.Conversation,
  cast: roles_lib.Cast = roles_lib.SINGLE,
) -> tuple[base.Experience, Episode]:
  """The experience of finished conversations, and their episodes.

  Rows whose environment failed have no reward and nothing to learn from. With
  roles, the terms of a row are those of its episode.

  Args:
    steps: updates of the policy, or of that of each role.
    problem: the problems.
    now: the conversations.
    cast: their roles.
  """
  role_B = roles_lib.role_of_row(cast, now.turns.shape[0])
  step_R = jnp.broadcast_to(jnp.stack(steps), (max(1, len(cast.names)),))
  kept_B = 1.0 - now.failed
  truncated_B = jnp.minimum(now.truncated + now.completions.alive, 1.0) * kept_B
  x = base.Experience(
    obs=problem.prompt,
    action=now.completions.action,
    logp=now.completions.logp,
    mask=now.own * (kept_B * roles_lib.is_learned(cast, kept_B))[:, None],
    truncated=truncated_B,
    version=jnp.broadcast_to(step_R[role_B][:, None], now.own.shape),
    env_failed=now.failed,
  )
  turns_B = now.turns.astype(jnp.float32)
  terms = {'turns': turns_B, **now.terms}
  turns = now.by_turn._replace(reward=now.by_turn.reward * kept_B[:, None])
  reward_B = turns.reward.sum(1)
  terms = roles_lib.terms(cast, terms, reward_B)
  return x, Episode(problem.answer, reward_B, truncated_B, terms, turns)


def episode_return(truncation_penalty: float = 0.0) -> stages.Stage:
  """A verifier that rewards a conversation by what its environment gave it.

  A conversation is correct where the sum of its rewards is above 1/2.

  Args:
    truncation_penalty: subtracted from the reward of conversations that a limit
      of tokens, turns or time ended.
  """

  def judge(episode: Episode, action_BT, mask_BT) -> base.Verdict:
    del action_BT, mask_BT
    correct_B = (episode.reward > 0.5).astype(jnp.float32)
    penalty_B = truncation_penalty * episode.truncated
    reward_B = episode.reward - penalty_B
    return base.Verdict(reward_B, correct_B, episode.terms, turns=episode.turns)

  return stages.Stage(judge, 'reward')
