"""Group relative policy optimization, arXiv:2402.03300.

Other arguments of `grpo` make it GSPO, CISPO, Dr. GRPO, RLOO, ReMax or
REINFORCE++.
"""

import functools
import inspect

import optax

import stages
from stages import base, ranges
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


def grpo(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  dual_clip: ranges.AboveOne | None = None,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  kl_to_go: bool = False,
  entropy_coef: float = 0.0,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  minibatch_by: minibatches.MinibatchBy = 'row',
  staleness: ranges.NonNegativeInt = 0,
  advantage: signatures.GroupAdvantage = advantages.group_relative,
  turn_advantage: signatures.TurnAdvantage | None = None,
  greedy_baseline: bool = False,
  normalize_advantages: bool = False,
  mask_truncated: bool = False,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  likelihood: signatures.Likelihood = losses.token_logp,
  aggregate: signatures.Aggregate = losses.sequence_mean_token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  rollouts: policy_stages.RolloutMethod = policy_stages.complete,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """GRPO: the rewards of a group of completions are each other's baseline.

    Aᵢ = (Rᵢ − mean R) / std R,   maximize  mean min(ρ A, clip(ρ) A) − β KL

  R is the reward of a completion, mean and std are those of its group, and
  ρ = exp(lp − lp_old) is the probability ratio of a token.

  Dr. GRPO is `advantage=advantages.group_centered` with
  `aggregate=losses.constant(length)`, RLOO is
  `advantage=advantages.leave_one_out`, GSPO is
  `likelihood=losses.sequence_logp`, and CISPO is `policy_loss=losses.cispo`
  with `clip_low=1.0` and `aggregate=losses.token_mean`. With
  `advantage=advantages.no_baseline`, `greedy_baseline` is ReMax, and
  `kl_to_go` with `normalize_advantages` is REINFORCE++; its variant with a
  baseline is `advantage=advantages.group_centered` with `normalize_advantages`
  and `kl_estimator=losses.kl_k2`. Of conversations, GiGPO is
  `turn_advantage=turn_advantages.by_state()`. `gin_configs/algorithms` has each
  of them.

  Args:
    policy: the language model to train.
    verify: stage `answer, action, mask -> base.Verdict`, or a
      `verifiers.LearnedVerifier`.
    optimizer: optimizer of the parameters.
    group_size: completions of each prompt.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1; above `clip_low` in DAPO's
      clip-higher.
    dual_clip: bound of the loss where the advantage is negative; only for
      `losses.ppo_clip`.
    kl_coef: β, weight of the KL term of the loss; if it and `kl_reward_coef`
      are 0, no reference is kept.
    kl_estimator: `logp, ref_logp -> KL`, for each token. The gradient of
      `kl_k2` is that of KL(π‖π_ref); the gradient of `kl_k3` is that of
      KL(π_ref‖π), which keeps probability on all that the reference samples,
      its mistakes included.
    kl_reward_coef: β, weight of a KL penalty in place of the KL term:
      β (lp − lp_ref) is subtracted from rewards.
    kl_to_go: whether that penalty is summed over each token and those after
      it, rather than over the whole completion.
    entropy_coef: weight of the entropy bonus.
    balance_coef: weight of the loss that balances experts, see
      `stages.language.scoring.balance`; 0 without it.
    num_minibatches: minibatches of a batch, one update each.
    num_epochs: passes over each batch.
    minibatch_by: 'row', 'shuffled' or 'arrival', see `minibatches`.
    staleness: steps by which the policy that samples is older than the one
      that is updated. It changes the algorithm. With 1 or more, a plan may
      overlap generation with updates.
    advantage: `reward_G -> advantage_G` of one group.
    turn_advantage: `reward_GK, taken_GK, state_GK -> advantage_GK` of the turns
      of one group of conversations, in place of `advantage`, such as
      `turn_advantages.by_state`; None for one advantage a completion.
    greedy_baseline: whether the reward of a greedy completion of the prompt is
      subtracted from rewards before `advantage`.
    normalize_advantages: whether advantages are whitened over all tokens of the
      batch.
    mask_truncated: whether the loss, and whitening, leave out completions that
      reached the length limit (overlong filtering, arXiv:2503.14476 §3.4).
    policy_loss: `logp, old_logp, advantage, clip_low, clip_high -> loss`, for
      each token.
    likelihood: `logp_BT, mask_BT -> logp_BT`: the log-probabilities, of tokens
      or of sequences, whose ratio is clipped.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`: the mean of the losses of
      all tokens, such as `losses.token_mean`.
    importance_weight: `proximal_logp, behavior_logp, mask -> weight`, the
      weight of the loss of each token. It is used where sampling rounds
      log-probabilities differently from scoring (another engine, or bfloat16),
      or where older versions of the policy sampled. The ratio is then clipped
      around the policy before the update, the proximal one.
    importance_bound: `weight, importance_cap -> weight`.
    importance_cap: bound of the weights.
    rollouts: `policy, group_size -> policy_stages.Rollouts`, the method of
      generation; `partial_rollout.partial_rollouts` carries unfinished
      completions into later steps.
    evaluator: `policy, verify -> evaluate`, see `stages.language.evaluate`.

  Raises:
    ValueError: for a KL term and a KL penalty at once, for `kl_to_go` without a
      penalty, or for a greedy baseline of rollouts that a step leaves
      unfinished, or beside another baseline.
  """
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef, kl_to_go)
  generate = rollouts(policy, group_size)
  _check_baseline(greedy_baseline, generate, advantage, turn_advantage)
  rescore = policy_stages.proximal_logp(policy, group_size, staleness, generate)
  repeat = policy_stages.repeat(group_size)
  above_greedy = advantage_stages.above_greedy(policy, verify, group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  objective = functools.partial(
    objectives.policy,
    clip=loss_terms.Clip(clip_low, clip_high, dual_clip),
    policy_loss=policy_loss,
    likelihood=likelihood,
    aggregate=aggregate,
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
    mask_truncated=mask_truncated,
  )
  update = policy_update.update(
    policy,
    optimizer,
    objective,
    advantage_stages.estimator(
      advantage,
      group_size,
      kl_coef=kl_reward_coef,
      kl_to_go=kl_to_go,
      normalize=normalize_advantages,
      mask_truncated=mask_truncated,
      turn_advantage=turn_advantage,
    ),
    minibatches.minibatches(
      minibatch_by, num_minibatches, num_epochs, group_size
    ),
    group_size=group_size,
    has_reference=has_kl,
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    entropy_coef=entropy_coef,
    balance_coef=balance_coef,
  )
  init = functools.partial(
    policy_update.init_state, policy, verify, optimizer, has_kl, staleness
  )
  version = lambda state: train_step.version(state.actor)

  def step(state: policy_update.State, problem: base.Problem, key):
    behavior, past = train_step.delayed(state.past, version(state))
    prompts = repeat(problem)
    finished, x, carry, carry_info = generate.run(
      behavior, state.carry, prompts, stages.keys(key, prompts.prompt)
    )
    x = rescore(version(state), x)
    verdict = verifiers.judge(verify, state.verifier, finished.answer, x)
    info = measure(x, verdict, state.actor.step) | carry_info
    if greedy_baseline:
      verdict = above_greedy(verdict, behavior, problem, key, state.verifier)
    actor, learned = update(state, key, prompts.prompt, x, verdict)
    return state._replace(actor=actor, past=past, carry=carry), info | learned

  return policy_stages.workflow(
    init, step, version, evaluator(policy, verify), generate, staleness
  )


def _check_baseline(greedy: bool, generate, advantage, turn_advantage):
  centered = (
    advantages.group_relative,
    advantages.group_centered,
    advantages.leave_one_out,
  )
  # Gin wraps the functions that recipes name.
  if greedy and not turn_advantage and inspect.unwrap(advantage) in centered:
    raise ValueError(
      'greedy_baseline subtracts a number from all rewards of a group, which '
      f'advantages.{inspect.unwrap(advantage).__name__} subtracts again: use '
      'advantage = advantages.no_baseline (ReMax), or leave greedy_baseline '
      'out.'
    )
  if greedy and generate.allocate:
    raise ValueError(
      'greedy_baseline compares the completions of a step with greedy ones of '
      'its prompts, and these rollouts finish prompts of other steps: leave '
      'out one of the two.'
    )
