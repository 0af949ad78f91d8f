"""Conversations: a policy and a text environment take turns in one row.

A row starts with a prompt. The policy generates until it ends its turn with an
end token. A host stage gives the turn to the row's environment, whose answer is
tokenized once and appended, and the policy continues after it. All tokens of a
conversation are one completion, so a forward pass scores it as any other; the
mask is 1 on the policy's own tokens and 0 on those of the environment.

With slots, only some of the rows that have the turn are continued at once, each
to the end of its turn, and the environments of the others work meanwhile. When
the answer to a row comes then changes none of its tokens.

What the policy wrote is never tokenized again: the tokens that are trained on
are the tokens that were sampled.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

import stages
from stages import base, ranges


class Conversation(NamedTuple):
  """Conversations under way.

  Attributes:
    id: bits of the key of each row, by which environments are found again.
    completions: all tokens so far, of the policy and of the environment; a row
      is alive while the policy has the turn.
    own: 1 on the tokens of the policy.
    waits: rows that have ended a turn, which the environment has not answered.
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
  turns: Int[Array, ' B']
  by_turn: base.Turns
  terms: Mapping[str, Float[Array, ' B']]
  truncated: Float[Array, ' B']
  failed: Float[Array, ' B']


class Reply(NamedTuple):
  """Answers of environments to turns; arbitrary in rows that do not wait.

  Attributes:
    answered: 1 where there is an answer; the other rows go on waiting.
    token: tokens of the answer, up to where the policy continues; padded on the
      right.
    mask: 1 on real tokens. Without any, an answer has no room.
    reward: reward of the turn.
    terminated: 1 where the episode has ended.
    truncated: 1 where something else ended it, such as a time limit.
    failed: 1 where the environment raised or took too long.
    terms: numbers of the turn to log, by name.
    state: number of the state that the answer leads to, as in `base.Turns`.
  """

  answered: Float[Array, ' B']
  token: Int[Array, 'B E']
  mask: Int[Array, 'B E']
  reward: Float[Array, ' B']
  terminated: Float[Array, ' B']
  truncated: Float[Array, ' B']
  failed: Float[Array, ' B']
  terms: Mapping[str, Float[Array, ' B']]
  state: Int[Array, ' B']


class TextEnvs(NamedTuple):
  """Text environments of a batch of rows, as `rlinf_jax.agents` makes them.

  Attributes:
    reply: host stage `answer, Conversation -> Reply`, where `answer` is that of
      the problem.
    max_answer_tokens: tokens that an answer has room for.
    terms: names of the numbers that they log.
    slots: rows that the policy continues at once; None for all, and `reply`
      then answers all that wait.
  """

  reply: stages.Stage
  max_answer_tokens: int
  terms: tuple[str, ...] = ()
  slots: int | None = None


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


def converse(
  policy: base.Policy,
  name: str,
  *,
  group_size: int = 1,
  greedy: bool = False,
  envs: TextEnvs,
  max_turns: ranges.PositiveInt,
  expected_turns: ranges.PositiveInt | None = None,
) -> Callable:
  """Returns `Version, problem, keys -> problem, Experience` over many turns.

  The problem that it returns has an `Episode` as its answer. A row ends when
  its environment ends it, when it has as many tokens as a completion of the
  policy may have, or after `max_turns` turns; the last two count as truncated.

  Token t of a row, counted over all of its turns, is drawn with
  `fold_in(key, t)`, so that no plan changes it, nor when answers come. Keys and
  values of a conversation are kept between its turns, and those of prompts, one
  for each group, or for each row in a slot, are computed in every round.

  Args:
    policy: the language model; its `response_length` is for all turns together,
      what the environment says included.
    name: name of the stage that generates.
    group_size: adjacent rows that share a prompt.
    greedy: whether to take the likeliest tokens.
    envs: the environments.
    max_turns: turns of the policy in a row.
    expected_turns: turns that planners count on; `max_turns` if None.

  Raises:
    ValueError: for a policy that cannot continue completions in JAX.
  """
  if policy.resume is None or policy.out_shapes is not None:
    raise ValueError(
      'A conversation continues after each answer, and this policy cannot '
      'continue a completion in JAX: leave out its slots (environments have '
      'slots of their own), engines (vLLM) and replay_routing, and use a '
      'language model that reads text alone.'
    )
  begin = stages.Stage(
    functools.partial(_begin, policy, envs.terms, max_turns),
    'begin_conversation',
  )
  generate = stages.Stage(
    functools.partial(
      _generate, policy, group_size, greedy, envs.max_answer_tokens, envs.slots
    ),
    name,
    unbatched=(0,),
    group_size=group_size,
  )
  append_stage = stages.Stage(append, 'append_reply')
  over = stages.Stage(_is_over, 'is_over', 'batch')
  finish_stage = stages.Stage(finish, 'end_conversation', unbatched=(0,))

  def take_turn(carry, actor, problem: base.Problem, key_B):
    now, cache = generate(actor, problem.prompt, key_B, *carry)
    now = append_stage(now, envs.reply(problem.answer, now))
    return (now, cache), over(now)

  def run(actor: base.Version, problem: base.Problem, key_B):
    carry = begin(problem.prompt, key_B)
    rounds = _rounds(key_B.shape[0], envs.slots, max_turns, expected_turns)
    loop = stages.Repeat(take_turn, f'{name}_turns', *rounds)
    now, _ = loop(carry, actor, problem, key_B)
    x, episode = finish_stage(actor.step, problem, now)
    return problem._replace(answer=episode), x

  return run


def _rounds(
  B: int, slots: int | None, max_turns: int, expected_turns: int | None
) -> tuple[int, int]:
  """Rounds of a loop of turns: at most, and as planners count on."""
  expected = expected_turns or max_turns
  if slots is None:
    return max_turns, expected
  # Each round has a turn or an answer of one row at least.
  return 2 * B * max_turns, expected * -(-B // slots)


def has_turn(completions: base.Completions) -> Bool[Array, ' B']:
  """Rows in which the policy has the turn, and room for a token."""
  return completions.alive & (completions.mask.min(1) == 0)


def _begin(
  policy: base.Policy,
  terms: tuple[str, ...],
  max_turns: int,
  prompt: base.Prompt,
  key_B,
) -> tuple[Conversation, Any]:
  """Conversations without a token, and their empty cache."""
  params = jax.eval_shape(policy.init, key_B[0])
  x = jax.eval_shape(policy.act, params, prompt, key_B)
  B = key_B.shape[0]
  zero_B = jnp.zeros(B, jnp.float32)

  def zeros(x):
    return jnp.zeros(x.shape, x.dtype)

  now = Conversation(
    id=jax.random.key_data(key_B),
    completions=base.Completions(
      zeros(x.action), zeros(x.logp), zeros(x.mask), jnp.ones(B, bool)
    ),
    own=zeros(x.mask),
    waits=jnp.zeros(B, bool),
    turns=jnp.zeros(B, jnp.int32),
    by_turn=base.Turns(
      jnp.zeros((B, max_turns)), jnp.zeros((B, max_turns), jnp.int32)
    ),
    terms=dict.fromkeys(terms, zero_B),
    truncated=zero_B,
    failed=zero_B,
  )
  return now, policy.empty_cache(B)


def _generate(
  policy: base.Policy,
  group_size: int,
  greedy: bool,
  max_answer_tokens: int,
  slots: int | None,
  actor: base.Version,
  prompt: base.Prompt,
  key_B,
  now: Conversation,
  cache: Any,
) -> tuple[Conversation, Any]:
  """Continues rows in which the policy has the turn, up to its end.

  With slots, these are `slots` of them, those with the fewest turns first.
  """
  old, row_M = now.completions, _next_rows(slots, now)
  given = prompt, key_B, old, cache
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
    max_unread=max_answer_tokens,
  )
  if row_M is not None:
    put = lambda x, some: x.at[row_M].set(some)
    new = jax.tree.map(put, (old, cache), new)
  new, cache = new
  now = now._replace(
    completions=new,
    own=now.own + new.mask - old.mask,
    waits=now.waits | (old.alive & ~new.alive),
  )
  return now, cache


def _next_rows(slots: int | None, now: Conversation) -> Int[Array, ' M'] | None:
  """Rows to continue, those with the fewest turns first; None for all."""
  if slots is None or slots >= now.turns.shape[0]:
    return None
  last = jnp.iinfo(jnp.int32).max
  turns_B = jnp.where(has_turn(now.completions), now.turns, last)
  return jnp.argsort(turns_B, stable=True)[:slots]


def append(now: Conversation, reply: Reply) -> Conversation:
  """Adds what environments said to the rows that waited for it.

  A row goes on if it has had less than K turns, and its answer leaves room for
  a token of the policy.
  """
  old, waits_B = now.completions, now.waits & (reply.answered > 0)
  (B, E), T = reply.mask.shape, old.mask.shape[1]
  length_B = old.mask.sum(1, dtype=jnp.int32)
  said_B = reply.mask.sum(1, dtype=jnp.int32)
  ends_B = (reply.terminated + reply.truncated + reply.failed) > 0
  reward_BK, state_BK = now.by_turn
  K = reward_BK.shape[1]
  fits_B = (said_B > 0) & (length_B + said_B < T) & (now.turns + 1 < K)
  goes_on_B = waits_B & ~ends_B & fits_B
  column_BE = length_B[:, None] + jnp.arange(E)[None]
  column_BE = jnp.where((reply.mask > 0) & goes_on_B[:, None], column_BE, T)
  row_B1 = jnp.arange(B)[:, None]

  def put(x_BT, x):
    return x_BT.at[row_B1, column_BE].set(x, mode='drop')

  def heard(x_B):
    return jnp.where(waits_B, x_B, 0)

  cut_B = waits_B & ~ends_B & ~fits_B
  turn_BK = jnp.arange(K)[None] - now.turns[:, None]
  is_now_BK = (turn_BK == 0) & waits_B[:, None]
  is_next_BK = (turn_BK == 1) & goes_on_B[:, None]
  return now._replace(
    completions=old._replace(
      action=put(old.action, reply.token),
      mask=put(old.mask, 1.0),
      alive=old.alive | goes_on_B,
    ),
    waits=now.waits & ~waits_B,
    turns=now.turns + waits_B,
    by_turn=base.Turns(
      jnp.where(is_now_BK, reply.reward[:, None], reward_BK),
      jnp.where(is_next_BK, reply.state[:, None], state_BK),
    ),
    terms={k: x_B + heard(reply.terms[k]) for k, x_B in now.terms.items()},
    truncated=now.truncated + heard(reply.truncated) + cut_B,
    failed=now.failed + heard(reply.failed),
  )


def _is_over(now: Conversation):
  """Whether no row has a turn to take, or waits for an answer."""
  return ~(has_turn(now.completions) | now.waits).any()


def finish(
  step, problem: base.Problem, now: Conversation
) -> tuple[base.Experience, Episode]:
  """The experience of finished conversations, and their episodes.

  Rows whose environment failed have no reward and nothing to learn from.
  """
  kept_B = 1.0 - now.failed
  truncated_B = jnp.minimum(now.truncated + now.completions.alive, 1.0) * kept_B
  x = base.Experience(
    obs=problem.prompt,
    action=now.completions.action,
    logp=now.completions.logp,
    mask=now.own * kept_B[:, None],
    truncated=truncated_B,
    version=jnp.broadcast_to(step, now.own.shape),
  )
  turns_B = now.turns.astype(jnp.float32)
  terms = {'turns': turns_B, 'env_failed': now.failed, **now.terms}
  turns = now.by_turn._replace(reward=now.by_turn.reward * kept_B[:, None])
  reward_B = turns.reward.sum(1)
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
