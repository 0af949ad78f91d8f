"""Proximal policy optimization of language models, arXiv:1707.06347.

Actor, critic and reference are those of arXiv:2203.02155. The critic estimates
a value before each token. `embodied_ppo` is the same equation in environments.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding import rules
import stages
from stages import base, metrics, ranges
from stages.language import evaluate as evaluate_lib
from stages.language import (
  policy_stages,
  rollout_metrics,
  value_model,
  verifiers,
)
from stages.language.scoring import balance
from stages.learn import (
  actor_critic,
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  rollout_correction,
  signatures,
  train_step,
  turn_advantages,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained; if it shares its trunk with the critic,
      also the critic's head.
    critic: the value model; `()` if it is a head on the trunk of the actor.
    reference: the policy's initial parameters, without frozen ones; `()` where
      there is no KL term.
    past: versions of the actor before each of the last `staleness` steps, the
      oldest first, without frozen parameters.
    carry: what `rollouts` carries from step to step; `()` by default.
    verifier: parameters of a learned verifier; `()` for others.
  """

  actor: base.TrainState
  critic: Any
  reference: base.Params
  past: tuple[base.Version, ...]
  carry: Any = ()
  verifier: base.Params = ()


def ppo(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  critic: value_model.ValueModel,
  optimizer: optax.GradientTransformation,
  critic_optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt = 1,
  discount: ranges.Fraction = 1.0,
  turn_discount: ranges.Fraction = 1.0,
  gae_lambda: signatures.Lambda = 0.95,
  critic_gae_lambda: signatures.Lambda | None = None,
  normalize_advantages: bool = True,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  dual_clip: ranges.AboveOne | None = None,
  value_coef: ranges.NonNegativeFloat = 1.0,
  value_clip: ranges.PositiveFloat | None = 0.2,
  critic_warmup_steps: ranges.NonNegativeInt = 0,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  entropy_coef: float = 0.0,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  minibatch_by: minibatches.MinibatchBy = 'shuffled',
  staleness: ranges.NonNegativeInt = 0,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  likelihood: signatures.Likelihood = losses.token_logp,
  aggregate: signatures.Aggregate = losses.token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  rollouts: policy_stages.RolloutMethod = policy_stages.complete,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """PPO of tokens: a critic's estimates are the baseline of their rewards.

    δₜ = rₜ + γ vₜ₊₁ − vₜ,   Aₜ = δₜ + γ λ Aₜ₊₁
    maximize  mean min(ρ A, clip(ρ) A) − c_v L_value − c_KL KL

  v is the critic's estimate before a token, and ρ = exp(lp − lp_old) the
  probability ratio. The verifier's reward is the reward of the last token. In a
  conversation, the policy's tokens alone are actions, and each turn's reward is
  that of its last token.

  VC-PPO (arXiv:2503.01491) is `critic_gae_lambda=1.0` with
  `critic_warmup_steps`; VAPO (arXiv:2504.05118) also has
  `gae_lambda=advantages.length_adaptive()` and a higher `clip_high`.

  Args:
    policy: the language model to train.
    verify: as in `grpo`.
    critic: the value model, with a trunk of its own or on that of the policy.
    optimizer: optimizer of the policy.
    critic_optimizer: optimizer of the value model, or of its head.
    group_size: completions of each prompt, which is encoded once for all.
    discount: γ, per token.
    turn_discount: factor of γ from the last token of a turn to the next turn.
    gae_lambda: λ of the advantages, or `length -> λ` of a completion.
    critic_gae_lambda: λ of the returns that the critic learns; `gae_lambda` if
      None.
    normalize_advantages: whether advantages are whitened over all tokens of the
      batch.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1.
    dual_clip: as in `grpo`.
    value_coef: c_v, weight of the critic's loss.
    value_clip: how far a value may move from the one before the update; None
      for no bound.
    critic_warmup_steps: number of first steps in which only the critic learns;
      on the trunk of the policy, only its head.
    kl_coef: c_KL, weight of the KL to the initial policy as a term of the loss.
    kl_estimator: as in `grpo`.
    kl_reward_coef: β, weight of a KL penalty in place of the KL term:
      β (lp − lp_ref) is subtracted from each token's reward. If both are 0, no
      reference is kept.
    entropy_coef: weight of the entropy bonus.
    balance_coef: as in `grpo`.
    num_minibatches: minibatches of a batch, one update each.
    num_epochs: passes over each batch.
    minibatch_by: as in `grpo`.
    staleness: as in `grpo`; values are those of the newest critic.
    policy_loss: as in `grpo`.
    likelihood: as in `grpo`.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`, of both losses.
    importance_weight: as in `grpo`.
    importance_bound: as in `grpo`.
    importance_cap: as in `grpo`.
    rollouts: as in `grpo`.
    evaluator: as in `grpo`.

  Raises:
    ValueError: for a KL term and a KL penalty at once, or for a critic on the
      trunk of a policy that replays routing.
  """
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef)
  balance.check(policy, balance_coef)
  value_model.check_trunk(policy, critic)
  generate = rollouts(policy, group_size)
  rescore = policy_stages.proximal_logp(policy, group_size, staleness, generate)
  repeat = policy_stages.repeat(group_size)
  score_ref = policy_stages.ref_logp(policy, group_size, has_kl)
  gae = (discount, turn_discount), gae_lambda, critic_gae_lambda
  shaping = kl_reward_coef, normalize_advantages
  estimate = estimator(critic, group_size, gae, shaping)
  num_updates = num_minibatches * num_epochs
  measure = _measure(group_size, num_updates)
  padding = rollout_metrics.packed_padding(policy, group_size)
  minibatch = minibatches.minibatches(
    minibatch_by, num_minibatches, num_epochs, group_size
  )
  policy_objective = functools.partial(
    objectives.policy,
    policy_stages.scorer(policy, group_size, balance=balance_coef > 0),
    clip=loss_terms.Clip(clip_low, clip_high, dual_clip),
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    entropy_coef=entropy_coef,
    balance_coef=balance_coef,
    policy_loss=policy_loss,
    likelihood=likelihood,
    aggregate=aggregate,
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
  )
  learner = actor_critic.learner(
    (policy, optimizer),
    (critic, critic_optimizer),
    (policy_objective, critic_loss(value_coef, value_clip)),
    aggregate=aggregate,
    warmup=(critic_warmup_steps, num_updates),
    group_size=group_size,
  )
  init = functools.partial(_init, policy, verify, learner, has_kl, staleness)

  def step(state: State, problem: base.Problem, key):
    now = _version(state)
    behavior, past = train_step.delayed(state.past, now)
    prompts = repeat(problem)
    problem, x, carry, carry_info = generate.run(
      behavior, state.carry, prompts, stages.keys(key, prompts.prompt)
    )
    x = rescore(now, x)
    verdict = verifiers.judge(verify, state.verifier, problem.answer, x)
    ref_logp = score_ref(state.reference, now, x)
    x = estimate(learner.critic_params(state), x, verdict, ref_logp)
    info = measure(x, verdict, state.actor.step) | carry_info
    batches = minibatch(key, prompts.prompt, x, ref_logp)
    info |= padding(batches)
    trained, learned = learner.update(state, batches)
    return state._replace(**trained, past=past, carry=carry), info | learned

  return policy_stages.workflow(
    init, step, _version, evaluator(policy, verify), generate, staleness
  )


def _version(state: State):
  return actor_critic.policy_version(state.actor)


def _init(policy, verify, learner, has_kl: bool, staleness: int, key) -> State:
  """The state before the first step."""
  actor, critic_state = learner.init(key)
  now = train_step.snapshot(actor_critic.policy_version(actor))
  reference = policy_stages.reference(policy, now.params) if has_kl else ()
  past = (now,) * staleness
  judge = verifiers.init(verify, jax.random.fold_in(key, 1))
  return State(actor, critic_state, reference, past, verifier=judge)


def estimator(
  critic: value_model.ValueModel,
  group_size: int,
  gae: tuple[tuple[float, float], signatures.Lambda, signatures.Lambda | None],
  shaping: tuple[float, bool],
) -> Callable:
  """Returns `params, experience, verdict, ref_logp_BT -> experience`.

  Args:
    critic: the value model; `params` are its parameters.
    group_size: adjacent rows that share a prompt.
    gae: (`discount`, `turn_discount`), `gae_lambda`, `critic_gae_lambda`.
    shaping: `kl_reward_coef` and `normalize_advantages`.
  """
  groups = {'group_size': group_size, 'divisible_groups': True}
  by_row = functools.partial(stages.Stage, **groups)

  def values(params, prompt, action_BT, mask_BT=None):
    group = rules.local_group(group_size, action_BT.shape[0])
    rows = prompt, action_BT
    return critic.value(params, *rows, group_size=group, mask=mask_BT)

  score = by_row(values, 'value', unbatched=(0,))
  discounts, *lambdas = gae
  penalty, normalize = shaping
  compute = functools.partial(compute_advantages, discounts, lambdas, penalty)
  compute = by_row(compute, 'compute_advantages')
  whiten = stages.Stage(advantages.whiten, 'whiten', 'batch')

  def estimate(params, x: base.Experience, verdict: base.Verdict, ref_logp_BT):
    # Others do not read it.
    masks = () if critic.packed_tokens is None else (x.mask,)
    value_BT = score(params, x.obs, x.action, *masks)
    logps = rollout_correction.old_logp(x), ref_logp_BT
    fields = compute(verdict.reward, *logps, value_BT, x.mask, verdict.turns)
    x = x._replace(**fields)
    if normalize:
      x = x._replace(advantage=whiten(x.advantage, x.mask))
    return x

  return estimate


def compute_advantages(
  discounts: tuple[float, float],
  lambdas: tuple[signatures.Lambda, signatures.Lambda | None],
  penalty: float,
  reward_B,
  logp_BT,
  ref_logp_BT,
  value_BT,
  mask_BT,
  turns: base.Turns | None = None,
) -> dict[str, Any]:
  """Computes fields of the experience: rewards, advantages, values and returns.

    rₜ = Rₖ [t is the last token of turn k] − β (lpₜ − lp_refₜ)

  All are [B, T] and 0 on padding.

  Args:
    discounts: γ, and its factor after the last token of a turn.
    lambdas: λ of the advantages and of the returns, as in `ppo`.
    penalty: β; 0 for no KL in the reward.
    reward_B: R, the reward of each completion.
    logp_BT: lp, before the update.
    ref_logp_BT: lp_ref; `()` without a reference.
    value_BT: the critic's estimates.
    mask_BT: 1 on the policy's own tokens.
    turns: the rewards of the turns of conversations, where what they do not add
      up to belongs to the last turn; None where a completion is one turn.
  """
  reward_BT, discount_BT = _at_turns(discounts, reward_B, turns, mask_BT)
  if penalty:
    kl_BT = losses.kl_k1(logp_BT, ref_logp_BT)
    reward_BT -= penalty * jnp.where(mask_BT > 0, kl_BT, 0.0)
  length_B = jnp.maximum(mask_BT.sum(1), 1.0)

  def gae(lambda_):
    if callable(lambda_):
      lambda_ = lambda_(length_B)
    lambda_B = jnp.broadcast_to(jnp.asarray(lambda_, float), length_B.shape)
    return jax.vmap(advantages.token_gae)(
      reward_BT, value_BT, mask_BT, discount_BT, lambda_B
    )

  advantage_BT = gae(lambdas[0])
  target_BT = advantage_BT if lambdas[1] is None else gae(lambdas[1])
  value_BT = jnp.where(mask_BT > 0, value_BT, 0.0)
  return {
    'advantage': advantage_BT,
    'reward': reward_BT,
    'value': value_BT,
    'return_': target_BT + value_BT,
  }


def _at_turns(
  discounts: tuple[float, float], reward_B, turns: base.Turns | None, mask_BT
):
  """The reward and the discount of each token, [B, T]."""
  discount, turn_discount = discounts
  if turns is None:
    if turn_discount != 1.0:
      raise ValueError('turn_discount is for conversations: leave it out.')
    reward_BT = jax.vmap(advantages.at_last_token)(reward_B, mask_BT)
    return reward_BT, jnp.full_like(reward_BT, discount)
  reward_BK, _ = jax.vmap(turn_advantages.of_turns)(
    turns.reward, reward_B, mask_BT
  )
  on_last = jax.vmap(turn_advantages.on_last_tokens)
  is_last_BT = on_last(jnp.ones_like(reward_BK), mask_BT)
  discount_BT = discount * (1.0 - (1.0 - turn_discount) * is_last_BT)
  return on_last(reward_BK, mask_BT), discount_BT


def critic_loss(value_coef: float, value_clip: float | None) -> Callable:
  """Returns `value_BT, experience -> loss_BT, info`.

  Args:
    value_coef: weight of the loss.
    value_clip: as in `ppo`.
  """

  def loss(value_BT, x: base.Experience):
    # Values of padding are arbitrary, and ∞ · 0 is NaN.
    value_BT = jnp.where(x.mask > 0, value_BT, 0.0)
    loss_BT = 0.5 * (value_BT - x.return_) ** 2
    info = {}
    if value_clip is not None:
      loss_BT = losses.value_clip(value_BT, x.value, x.return_, value_clip)
      clipped_BT = 1.0 * (jnp.abs(value_BT - x.value) > value_clip)
      info['train/value_clip_fraction'] = metrics.mean(clipped_BT, x.mask)
    info['train/value_loss'] = metrics.mean(loss_BT, x.mask)
    return value_coef * loss_BT, info

  return loss


def _measure(group_size: int, updates_per_step: int) -> stages.Stage:
  """Returns a stage `experience, verdict, actor_step -> info`."""
  run = functools.partial(describe, group_size, updates_per_step)
  return stages.Stage(run, 'measure', 'sum', (2,), group_size)


def describe(
  group_size: int,
  updates_per_step: int,
  x: base.Experience,
  verdict: base.Verdict,
  actor_step,
) -> base.Info:
  """Metrics of completions and of their values."""
  info = rollout_metrics.describe(
    x, verdict, actor_step, group_size, updates_per_step
  )
  if group_size == 1:
    del info['rollout/groups_degenerate']  # It would always be 1.
  return info | {
    'rollout/value': metrics.moments(x.value, x.mask),
    'rollout/return': metrics.moments(x.return_, x.mask),
    'train/explained_variance': metrics.explained_variance(
      x.value, x.return_, x.mask
    ),
  }
