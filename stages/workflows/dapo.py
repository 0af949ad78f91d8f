"""Decoupled clip and dynamic sampling policy optimization, arXiv:2503.14476."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges, repeat
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages, rollout_metrics, verifiers
from stages.language.scoring import balance
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained.
    past: versions of the actor before each of the last `staleness` steps, the
      oldest first, without frozen parameters.
  """

  actor: base.TrainState
  past: tuple[base.Version, ...] = ()


class Accepted(NamedTuple):
  """The groups accepted so far, with room for those of one round.

  Attributes:
    x: experience, in groups; `mask` is 0 where none is accepted yet.
    verdict: its rewards.
    filled: number of accepted groups.
    round: rounds of sampling so far.
    accuracy: mean accuracy of all samples, accepted or not.
  """

  x: base.Experience
  verdict: base.Verdict
  filled: jax.Array
  round: jax.Array
  accuracy: metrics.Mean


def dapo(
  policy: base.Policy,
  verify: stages.Stage,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  max_rounds: ranges.PositiveInt,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.28,
  overlong_buffer: ranges.PositiveInt | None = None,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  expected_rounds: ranges.PositiveInt | None = None,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  staleness: ranges.NonNegativeInt = 0,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Learns from groups of mixed accuracy: neither all right nor all wrong.

  A batch holds the prompts of `max_rounds` rounds of sampling. Each round
  completes its share of them and keeps the groups of mixed accuracy, until
  there are as many groups as prompts in a round, or no prompts are left.
  Missing groups are padding without tokens; the loss is a mean over tokens. The
  paper samples without a bound.

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> base.Verdict`; not a learned one.
    optimizer: optimizer of the parameters.
    group_size: completions of each prompt.
    max_rounds: upper bound on rounds of sampling.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1 (clip-higher).
    overlong_buffer: the last tokens before the length limit, over which the
      reward falls linearly by 1 (soft overlong punishment, eq. 13); None for no
      punishment.
    num_minibatches: minibatches of a batch, with an update each.
    num_epochs: passes over each batch, shuffled anew in each.
    expected_rounds: rounds that planners count on; `max_rounds` if None.
    balance_coef: as in `grpo`.
    mask_truncated: likewise.
    staleness: likewise.
    importance_weight: likewise.
    importance_bound: likewise.
    importance_cap: likewise.
    evaluator: likewise.

  Raises:
    ValueError: for a learned verifier.
  """
  verifiers.refuse_learned(verify)
  balance.check(policy, balance_coef)
  prompts_of = functools.partial(_round_prompts, max_rounds, group_size)
  take_prompts = stages.Stage(prompts_of, 'round_prompts', 'batch')
  generate = policy_stages.act(policy, 'generate', group_size=group_size)
  accept = stages.Stage(
    functools.partial(_accept, group_size), 'accept', 'batch'
  )
  rescore = policy_stages.proximal_logp(policy, group_size, staleness)
  measure = _measure(group_size, num_minibatches * num_epochs)
  padding = rollout_metrics.packed_padding(policy, group_size)
  minibatch = minibatches.minibatches(
    'shuffled', num_minibatches, num_epochs, group_size
  )
  loss = objectives.policy(
    policy_stages.scorer(policy, group_size, balance=balance_coef > 0),
    balance_coef=balance_coef,
    clip=loss_terms.Clip(clip_low, clip_high),
    aggregate=losses.token_mean,
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
    mask_truncated=mask_truncated,
  )
  learn = train_step.learner(
    loss, optimizer, group_size=group_size, divisible_groups=True
  )
  evaluate_actor = evaluator(policy, verify)
  none_accepted = _none_accepted(prompts_of, generate, verify)
  group_advantage = _group_advantage(group_size, overlong_buffer)

  def sample(accepted: Accepted, actor: base.Version, problem, key):
    """Samples one round."""
    prompts, key_B = take_prompts(problem, key, accepted.round)
    x = generate(actor, prompts.prompt, key_B)
    return accept(accepted, x, verify(prompts.answer, x.action, x.mask))

  fill = repeat.Repeat(sample, 'fill', max_rounds, expected_rounds)

  init = functools.partial(_init, policy, optimizer, staleness)

  def step(state: State, problem: base.Problem, key):
    now = train_step.version(state.actor)
    behavior, past = train_step.delayed(state.past, now)
    empty = none_accepted(behavior, problem, key)
    accepted = fill(empty, behavior, problem, key)
    x = rescore(now, accepted.x)
    rollout_info = measure(accepted._replace(x=x), state.actor.step)
    x = x._replace(advantage=group_advantage(accepted.verdict.reward, x.mask))
    batches = minibatch(key, empty.x.mask, x, ())
    rollout_info |= padding(batches)
    actor, info = learn(state.actor, batches)
    return State(actor, past), rollout_info | info

  def evaluate(state: State, problem: base.Problem, key):
    return evaluate_actor(train_step.version(state.actor), problem, key)

  return base.Workflow(
    init, step, evaluate, lambda state: state.actor.params, staleness
  )


def _init(policy, optimizer, staleness: int, key) -> State:
  """The state before the first step."""
  actor = train_step.init(policy.init(key), optimizer)
  now = train_step.snapshot(train_step.version(actor))
  return State(actor, (now,) * staleness)


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
  prompts_of, generate: stages.Stage, verify: stages.Stage
) -> stages.Stage:
  """Returns a stage `actor, problem, key -> Accepted` of no groups.

  There is room for those of one round.
  """

  @stages.stage('none_accepted', 'batch')
  def none_accepted(actor: base.Version, problem, key):
    problem, key_B = prompts_of(problem, key, jnp.int32(0))
    shapes = generate.shapes(actor, problem.prompt, key_B)
    x = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    shapes = verify.shapes(problem.answer, x.action, x.mask)
    verdict = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero, none = jnp.zeros(()), jnp.int32(0)
    # Real prompts: a policy may return NaN for one that is all padding.
    x = x._replace(obs=problem.prompt)
    return Accepted(x, verdict, none, none, metrics.Mean(zero, zero))

  return none_accepted


def _group_advantage(
  group_size: int, overlong_buffer: int | None
) -> stages.Stage:
  """Returns a stage `reward_B, mask_BT -> advantage_BT` of shaped rewards.

  Advantages are 0 on padding.
  """

  @stages.stage('group_advantage', group_size=group_size)
  def group_advantage(reward_B, mask_BT):
    if overlong_buffer is not None:
      _check_buffer(overlong_buffer, mask_BT.shape[1])
      reward_B += overlong(mask_BT.sum(1), mask_BT.shape[1], overlong_buffer)
    reward_NG = reward_B.reshape(-1, group_size)
    advantage_NG = jax.vmap(advantages.group_relative)(reward_NG)
    return advantage_NG.reshape(-1, 1) * mask_BT

  return group_advantage


def _accept(group_size: int, accepted: Accepted, x: base.Experience, verdict):
  """Accepts groups of mixed accuracy, in order, while there is room.

  Returns:
    `accepted, done`: the accepted groups, and whether there are enough.
  """
  correct_NG = verdict.correct.reshape(-1, group_size)
  N = correct_NG.shape[0]
  mixed_N = correct_NG.max(1) != correct_NG.min(1)
  index_N = accepted.filled + jnp.cumsum(mixed_N) - 1
  index_N = jnp.where(mixed_N, jnp.minimum(index_N, N), N)  # N is nowhere.

  def put(old, new):
    groups = old.reshape(N, group_size, *old.shape[1:])
    new = new.reshape(groups.shape)
    return groups.at[index_N].set(new, mode='drop').reshape(old.shape)

  kept, judged = jax.tree.map(put, (accepted.x, accepted.verdict), (x, verdict))
  filled = jnp.minimum(N, accepted.filled + mixed_N.sum(dtype=jnp.int32))
  drawn = metrics.mean(verdict.correct.astype(accepted.accuracy.sum.dtype))
  accepted = Accepted(
    kept, judged, filled, accepted.round + 1, accepted.accuracy.merge(drawn)
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
  del info['rollout/groups_degenerate']  # Always zero.
  return info | {
    'rollout/accuracy': accepted.accuracy,
    'rollout/rounds': metrics.Mean(accepted.round * one, one),
    'rollout/groups_filled': metrics.Mean(accepted.filled * one, N * one),
  }
