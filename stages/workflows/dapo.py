"""Decoupled clip and dynamic sampling policy optimization, arXiv:2503.14476."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges, repeat, shapes
from stages.language import (
  advantage_stages,
  policy_stages,
  policy_update,
  rollout_metrics,
  verifiers,
)
from stages.language import evaluate as evaluate_lib
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  signatures,
  train_step,
)


class Accepted(NamedTuple):
  """The groups accepted so far, with room for those of one round.

  Attributes:
    x: experience, in groups; `mask` is 0 where none is accepted yet.
    verdict: its rewards.
    filled: number of accepted groups.
    round: rounds of sampling so far.
    accuracy: mean accuracy of all samples, accepted or not.
    info: metrics of all rounds: of what `rollouts` carries, and of environments
      that failed.
  """

  x: base.Experience
  verdict: base.Verdict
  filled: jax.Array
  round: jax.Array
  accuracy: metrics.Mean
  info: base.Info = {}


def dapo(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  max_rounds: ranges.PositiveInt,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.28,
  overlong_buffer: ranges.PositiveInt | None = None,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  expected_rounds: ranges.PositiveInt | None = None,
  keep_kv_cache: bool = False,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  staleness: ranges.NonNegativeInt = 0,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  rollouts: policy_stages.RolloutMethod = policy_stages.complete,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Learns from groups of mixed accuracy: neither all right nor all wrong.

  A batch holds the prompts of `max_rounds` rounds of sampling. Each round
  completes its share of them and keeps the groups of mixed accuracy, until
  there are as many groups as prompts in a round, or no prompts are left.
  Missing groups are padding without tokens; the loss is a mean over tokens. The
  paper samples without a bound, and has no KL to the initial policy.

  Args:
    policy: the language model to train.
    verify: as in `grpo`.
    optimizer: optimizer of the parameters.
    group_size: completions of each prompt.
    max_rounds: upper bound on rounds of sampling.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1 (clip-higher).
    overlong_buffer: the last tokens before the length limit, over which the
      reward falls linearly by 1 (soft overlong punishment, eq. 13); None for no
      punishment.
    kl_coef: β, weight of the KL term of the loss; if it and `kl_reward_coef`
      are 0, no reference is kept.
    kl_estimator: as in `grpo`.
    kl_reward_coef: β, weight of a KL penalty in place of the KL term: the sum
      of β (lp − lp_ref) over a completion is subtracted from its reward. It
      does not change which groups are kept, as the verifier decides that.
    num_minibatches: minibatches of a batch, with an update each.
    num_epochs: passes over each batch, shuffled anew in each.
    expected_rounds: rounds that planners count on; `max_rounds` if None.
    keep_kv_cache: whether the next round of a step has the keys and values of
      completions that a round leaves unfinished, and need not read their tokens
      again. Needs partial rollouts in slots, and several rounds.
    balance_coef: as in `grpo`.
    mask_truncated: likewise.
    staleness: likewise.
    importance_weight: likewise.
    importance_bound: likewise.
    importance_cap: likewise.
    rollouts: likewise. `partial_rollout.partial_rollouts` carries unfinished
      completions into the next round, of this step or of the next one: its
      `max_carry` counts rounds, and `extra_groups` are beside those of a round.
    evaluator: likewise.

  Raises:
    ValueError: for a KL term and a KL penalty at once, and for keys and values
      to keep of rollouts that have none, or of a single round.
  """
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef)
  take_prompts = _take_prompts(max_rounds, group_size)
  generate = _in_rounds(rollouts(policy, group_size), max_rounds, keep_kv_cache)
  accept = _accept_stage(group_size)
  rescore = policy_stages.proximal_logp(policy, group_size, staleness, generate)
  measure = _measure(group_size, num_minibatches * num_epochs)
  shape_rewards = _shape_rewards(overlong_buffer)
  update = policy_update.update(
    policy,
    optimizer,
    functools.partial(
      objectives.policy,
      clip=loss_terms.Clip(clip_low, clip_high),
      aggregate=losses.token_mean,
      importance=loss_terms.Importance(
        importance_weight, importance_bound, importance_cap
      ),
      mask_truncated=mask_truncated,
    ),
    advantage_stages.estimator(
      advantages.group_relative, group_size, kl_coef=kl_reward_coef
    ),
    minibatches.minibatches(
      'shuffled', num_minibatches, num_epochs, group_size
    ),
    group_size=group_size,
    has_reference=has_kl,
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    balance_coef=balance_coef,
  )
  init = functools.partial(
    policy_update.init_state, policy, verify, optimizer, has_kl, staleness
  )

  def draw(carry, actor: base.Version, judge, problem: base.Problem, key, i):
    prompts, key_B = take_prompts(problem, key, i)
    finished, x, carry, info = generate.run(actor, carry, prompts, key_B)
    return carry, x, verifiers.judge(verify, judge, finished.answer, x), info

  def sample(so_far, *given):
    accepted, carry = so_far
    carry, *drawn = draw(carry, *given, accepted.round)
    accepted, done = accept(accepted, *drawn)
    return (accepted, carry), done

  none_accepted = _none_accepted(init, take_prompts, draw)
  fill = repeat.Repeat(sample, 'fill', max_rounds, expected_rounds)

  def step(state: policy_update.State, problem: base.Problem, key):
    behavior, past = train_step.delayed(state.past, _version(state))
    given = behavior, state.verifier, problem, key
    empty = none_accepted(state.carry, problem, key)
    accepted, carry = fill((empty, generate.keep(state.carry)), *given)
    x = rescore(_version(state), accepted.x)
    info = measure(accepted._replace(x=x), state.actor.step)
    verdict = shape_rewards(accepted.verdict, x.mask)
    actor, learned = update(state, key, empty.x.mask, x, verdict)
    carry = generate.drop(carry)
    return state._replace(actor=actor, past=past, carry=carry), info | learned

  return policy_stages.workflow(
    init, step, _version, evaluator(policy, verify), generate, staleness
  )


def _version(state: policy_update.State) -> base.Version:
  return train_step.version(state.actor)


def _in_rounds(
  generate: policy_stages.Rollouts, rounds: int, keep_kv_cache: bool
) -> policy_stages.Rollouts:
  """Rollouts that have room for what rounds, not batches, leave unfinished."""
  if not keep_kv_cache:
    generate = generate._replace(keep=lambda x: x, drop=lambda x: x)
  elif generate.keep is None:
    raise ValueError(
      'keep_kv_cache is for completions that a round leaves to the next one, '
      'and these rollouts leave none or cannot keep their keys and values: '
      'leave keep_kv_cache out, or generate by partial_rollouts with max_carry '
      'and extra_groups above 0, and by a policy with slots and no engine.'
    )
  elif rounds == 1:
    raise ValueError(
      'keep_kv_cache is for the rounds after the first one of a step, and with '
      'max_rounds=1 there are none: leave keep_kv_cache out, or raise '
      'max_rounds.'
    )
  if generate.allocate is None:
    return generate

  def allocate(problem: base.Problem):
    return generate.allocate(
      jax.tree.map(lambda x: x[: x.shape[0] // rounds], problem)
    )

  return generate._replace(allocate=allocate)


def overlong(length_B, limit: int, buffer: int):
  """Soft overlong punishment, arXiv:2503.14476 eq. 13.

    0                          where |y| ≤ L − C
    ((L − C) − |y|) / C        where L − C < |y| ≤ L

  Args:
    length_B: |y|, tokens of each completion.
    limit: L, the most tokens that a completion may have.
    buffer: C, tokens.
  """
  return jnp.clip((limit - buffer - length_B) / buffer, -1.0, 0.0)


def _check_buffer(buffer: int, limit: int):
  if buffer >= limit:
    raise ValueError(
      f'overlong_buffer = {buffer} reaches over the whole completion, of '
      f'{limit} tokens at most, so that each would be punished for its length: '
      'give fewer tokens than that.'
    )


def _take_prompts(rounds: int, group_size: int) -> stages.Stage:
  """Returns a stage `problem, key, round -> prompts, keys`."""
  take = functools.partial(_round_prompts, rounds, group_size)
  return stages.Stage(take, 'round_prompts', 'batch')


def _round_prompts(
  rounds: int, group_size: int, problem: base.Problem, key, round_
):
  """Prompts of a round, repeated for their groups, and a key for each row.

  A row's key is that of its position among the rows of all rounds, so that it
  depends neither on the number of rounds nor on what they accept.
  """
  N = jax.tree.leaves(problem)[0].shape[0]
  if N % rounds:
    raise ValueError(
      f'{N} prompts cannot be asked in {rounds} rounds: the batch must be a '
      f'multiple of {rounds} prompts, and is for all rounds together.'
    )
  n = N // rounds

  def take(x):
    x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), round_ * n, n)
    return jnp.repeat(x, group_size, axis=0)

  id_B = round_ * n * group_size + jnp.arange(n * group_size)
  key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, id_B)
  return jax.tree.map(take, problem), key_B


def _none_accepted(
  init: Callable, take_prompts: stages.Stage, draw: Callable
) -> stages.Stage:
  """Returns a stage `carry, problem, key -> Accepted` of no groups.

  There is room for those of one round. It reads no parameters, so that no place
  has to hold them for their shapes.
  """

  @stages.stage('none_accepted', 'batch')
  def none_accepted(carry, problem: base.Problem, key):
    state, first = jax.eval_shape(init, key), jnp.int32(0)
    given = _version(state), state.verifier, problem, key, first
    _, *made = shapes.of(draw, carry, *given)
    x, verdict, info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
    zero = jnp.zeros(())
    # Real prompts: a policy may return NaN for one that is all padding.
    x = x._replace(obs=take_prompts.fn(problem, key, first)[0].prompt)
    info |= rollout_metrics.failures(x)
    return Accepted(x, verdict, first, first, metrics.Mean(zero, zero), info)

  return none_accepted


def _shape_rewards(overlong_buffer: int | None) -> Callable:
  """Returns `verdict, mask_BT -> verdict`, with `overlong` added to rewards."""
  if overlong_buffer is None:
    return lambda verdict, mask_BT: verdict

  @stages.stage('shape_rewards')
  def shaped(reward_B, mask_BT):
    limit = mask_BT.shape[1]
    _check_buffer(overlong_buffer, limit)
    return reward_B + overlong(mask_BT.sum(1), limit, overlong_buffer)

  return lambda verdict, mask_BT: verdict._replace(
    reward=shaped(verdict.reward, mask_BT)
  )


def _accept_stage(group_size: int) -> stages.Stage:
  """Returns a stage `accepted, x, verdict, carry_info -> accepted, done`."""
  return stages.Stage(functools.partial(_accept, group_size), 'accept', 'batch')


def _accept(
  group_size: int,
  accepted: Accepted,
  x: base.Experience,
  verdict: base.Verdict,
  carry_info: base.Info,
):
  """Accepts groups of mixed accuracy, in order, while there is room.

  Rows without a token, such as those that a first round with partial rollouts
  lacks, have no accuracy.

  Returns:
    `accepted, done`: the accepted groups, and whether there are enough.
  """
  real_B = x.mask.max(1)
  real_NG = real_B.reshape(-1, group_size) > 0
  correct_NG = verdict.correct.reshape(-1, group_size)
  N = correct_NG.shape[0]
  most_N = jnp.where(real_NG, correct_NG, -jnp.inf).max(1)
  mixed_N = most_N > jnp.where(real_NG, correct_NG, jnp.inf).min(1)
  index_N = accepted.filled + jnp.cumsum(mixed_N) - 1
  index_N = jnp.where(mixed_N, jnp.minimum(index_N, N), N)  # N is nowhere.

  def put(old, new):
    groups = old.reshape(N, group_size, *old.shape[1:])
    new = new.reshape(groups.shape)
    return groups.at[index_N].set(new, mode='drop').reshape(old.shape)

  kept, judged = jax.tree.map(put, (accepted.x, accepted.verdict), (x, verdict))
  filled = jnp.minimum(N, accepted.filled + mixed_N.sum(dtype=jnp.int32))
  correct_B = jnp.where(real_B > 0, verdict.correct, 0.0)
  correct_B = correct_B.astype(accepted.accuracy.sum.dtype)
  drawn = metrics.mean(correct_B, real_B.astype(correct_B.dtype))
  accepted = Accepted(
    kept,
    judged,
    filled,
    accepted.round + 1,
    accepted.accuracy.merge(drawn),
    metrics.merge(accepted.info, carry_info | rollout_metrics.failures(x)),
  )
  return accepted, filled >= N


def _measure(group_size: int, updates_per_step: int) -> stages.Stage:
  """Returns a stage `accepted, actor_step -> info`."""
  run = functools.partial(_describe, group_size, updates_per_step)
  return stages.Stage(run, 'measure', 'batch')


def _describe(
  group_size: int, updates_per_step: int, accepted: Accepted, actor_step
) -> base.Info:
  """Metrics of all samples, and of the groups that are learned from."""
  N, one = accepted.x.mask.shape[0] // group_size, jnp.ones(())
  info = rollout_metrics.describe(
    accepted.x, accepted.verdict, actor_step, group_size, updates_per_step
  )
  return (
    info
    | accepted.info
    | {
      'rollout/accuracy': accepted.accuracy,
      'rollout/rounds': metrics.Mean(accepted.round * one, one),
      'rollout/groups_filled': metrics.Mean(accepted.filled * one, N * one),
    }
  )
