"""On-policy distillation: a teacher scores the tokens that a student samples.

It is arXiv:2306.13649 with the reverse KL, whose gradient is estimated from the
sampled tokens.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges
from stages.language import evaluate as evaluate_lib
from stages.language import (
  policy_stages,
  policy_update,
  rollout_metrics,
  verifiers,
)
from stages.learn import (
  loss_terms,
  losses,
  minibatches,
  objectives,
  rollout_correction,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the student; this and what follows as in `policy_update.State`.
    reference: its initial parameters.
    past: its versions before each of the last `staleness` steps.
    carry: what `rollouts` carries.
    verifier: parameters of a learned verifier.
    teacher: parameters of the teacher, frozen.
  """

  actor: base.TrainState
  reference: base.Params
  past: tuple[base.Version, ...]
  carry: Any
  verifier: base.Params
  teacher: base.Params


def distillation(
  policy: base.Policy,
  teacher: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  minibatch_by: minibatches.MinibatchBy = 'row',
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  staleness: ranges.NonNegativeInt = 0,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  aggregate: signatures.Aggregate = losses.token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  rollouts: policy_stages.RolloutMethod = policy_stages.complete,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Trains a student towards a teacher on the student's own completions.

    Aₜ = sg(lp_teacher − lp),   maximize  mean min(ρ A, clip(ρ) A) − β KL

  sg stops the gradient. The mean of −A estimates KL(student‖teacher). The
  advantage of a token is its own log-ratio: its effect on later tokens is left
  out, as with a discount of 0. KL is that to the initial student.

  Args:
    policy: the student, a language model to train.
    teacher: a language model with the same vocabulary, see
      `huggingface.teacher`. It scores tokens under the distribution that the
      student samples from, so both have the same `sampling`.
    verify: as in `grpo`; it measures the student and does not train it.
    optimizer: optimizer of the student's parameters.
    group_size: completions of each prompt.
    clip_low: as in `grpo`.
    clip_high: likewise.
    kl_coef: β, weight of the KL to the initial student, as a term of the loss;
      if it and `kl_reward_coef` are 0, no reference is kept.
    kl_estimator: as in `grpo`.
    kl_reward_coef: β in place of the KL term: β (lp − lp_ref) is subtracted
      from the advantage of each token. At best, the student is then
      π ∝ (π_teacher π_ref^β)^(1 / (1 + β)), between its teacher and itself.
    num_minibatches: as in `grpo`.
    num_epochs: likewise.
    minibatch_by: likewise.
    balance_coef: likewise.
    mask_truncated: likewise.
    staleness: likewise.
    policy_loss: likewise.
    aggregate: likewise.
    importance_weight: likewise.
    importance_bound: likewise.
    importance_cap: likewise.
    rollouts: likewise.
    evaluator: likewise.

  Raises:
    ValueError: if the student samples from another distribution than the
      teacher scores under, or for a KL term and a KL penalty at once.
  """
  _check_sampling(policy, teacher)
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef)
  repeat = policy_stages.repeat(group_size)
  generate = rollouts(policy, group_size)
  rescore = policy_stages.proximal_logp(policy, group_size, staleness, generate)
  score = policy_stages.logp(teacher, 'teacher_logp', group_size)
  estimate = stages.Stage(teacher_advantage, 'teacher_advantage')
  gap = stages.Stage(teacher_gap, 'teacher_gap', 'sum', group_size=group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  update = policy_update.update(
    policy,
    optimizer,
    functools.partial(
      objectives.policy,
      clip=loss_terms.Clip(clip_low, clip_high),
      policy_loss=policy_loss,
      aggregate=aggregate,
      importance=loss_terms.Importance(
        importance_weight, importance_bound, importance_cap
      ),
      mask_truncated=mask_truncated,
    ),
    _less_kl(kl_reward_coef),
    minibatches.minibatches(
      minibatch_by, num_minibatches, num_epochs, group_size
    ),
    group_size=group_size,
    has_reference=has_kl,
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    balance_coef=balance_coef,
  )
  version = lambda state: train_step.version(state.actor)
  init = functools.partial(
    _init, policy, teacher, verify, optimizer, has_kl, staleness
  )

  def step(state: State, problem: base.Problem, key):
    behavior, past = train_step.delayed(state.past, version(state))
    prompts = repeat(problem)
    finished, x, carry, carry_info = generate.run(
      behavior, state.carry, prompts, stages.keys(key, prompts.prompt)
    )
    x = rescore(version(state), x)
    verdict = verifiers.judge(verify, state.verifier, finished.answer, x)
    info = measure(x, verdict, state.actor.step) | carry_info
    teacher_logp = score(state.teacher[base.FROZEN], x)
    logp = rollout_correction.old_logp(x)
    x = x._replace(advantage=estimate(teacher_logp, logp, x.mask))
    info |= gap(x.advantage, x.mask)
    actor, learned = update(state, key, prompts.prompt, x, verdict)
    return state._replace(actor=actor, past=past, carry=carry), info | learned

  return policy_stages.workflow(
    init, step, version, evaluator(policy, verify), generate, staleness
  )


def _init(
  policy, teacher, verify, optimizer, has_reference: bool, staleness: int, key
) -> State:
  """The state before the first step."""
  student = policy_update.init_state(
    policy, verify, optimizer, has_reference, staleness, key
  )
  frozen = policy_stages.rounded(teacher, teacher.init(key))
  return State(*student, {base.FROZEN: frozen})


def _check_sampling(policy: base.Policy, teacher: base.Policy):
  either_unknown = policy.sampling is None or teacher.sampling is None
  if not either_unknown and teacher.sampling != policy.sampling:
    raise ValueError(
      f'The student samples from {policy.sampling} and the teacher scores '
      f'under {teacher.sampling}, which would count as a difference of the two '
      'models: give both the same sampling (SAMPLING in gin).'
    )


def teacher_advantage(teacher_logp_BT, logp_BT, mask_BT):
  """Aₜ = lp_teacher − lp of each token; 0 on padding."""
  return jnp.where(mask_BT > 0, teacher_logp_BT - logp_BT, 0.0)


def _less_kl(coef: float) -> Callable:
  """Returns `experience, reward, ref_logp, turns -> advantage_BT`.

  They are the advantages of the experience, less β (lp − lp_ref).

  Args:
    coef: β.
  """
  subtract = stages.Stage(functools.partial(less_kl, coef), 'less_kl')

  def estimate(x: base.Experience, reward_B, ref_logp_BT, turns):
    del reward_B, turns  # They do not train.
    if not coef:
      return x.advantage
    logp = rollout_correction.old_logp(x)
    return subtract(x.advantage, logp, ref_logp_BT, x.mask)

  return estimate


def less_kl(coef: float, advantage_BT, logp_BT, ref_logp_BT, mask_BT):
  """Aₜ − β (lpₜ − lp_refₜ) of each token; 0 on padding."""
  kl_BT = losses.kl_k1(logp_BT, ref_logp_BT)
  return jnp.where(mask_BT > 0, advantage_BT - coef * kl_BT, 0.0)


def teacher_gap(advantage_BT, mask_BT) -> base.Info:
  """Mean of lp − lp_teacher over the drawn tokens, in nats.

  It is the k1 estimate of KL(student‖teacher) where the student drew them with
  its newest parameters.
  """
  return {'rollout/kl_teacher': metrics.mean(-advantage_BT, mask_BT)}
