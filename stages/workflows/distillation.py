"""On-policy distillation: a teacher scores the tokens that a student samples.

It is arXiv:2306.13649 with the reverse KL, whose gradient is estimated from the
sampled tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges
from stages.language import evaluate as evaluate_lib
from stages.language import policy_stages, rollout_metrics, verifiers
from stages.language.scoring import balance
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
    actor: the student.
    teacher: parameters of the teacher, frozen.
    verifier: parameters of a learned verifier; `()` for others.
  """

  actor: base.TrainState
  teacher: base.Params
  verifier: base.Params = ()


def distillation(
  policy: base.Policy,
  teacher: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  minibatch_by: minibatches.MinibatchBy = 'row',
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  aggregate: signatures.Aggregate = losses.token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Trains a student towards a teacher on the student's own completions.

    Aₜ = sg(lp_teacher − lp),   maximize  mean min(ρ A, clip(ρ) A)

  sg stops the gradient. The mean of −A estimates KL(student‖teacher). The
  advantage of a token is its own log-ratio: its effect on later tokens is left
  out, as with a discount of 0.

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
    num_minibatches: likewise.
    num_epochs: likewise.
    minibatch_by: likewise.
    balance_coef: likewise.
    mask_truncated: likewise.
    policy_loss: likewise.
    aggregate: likewise.
    importance_weight: likewise.
    importance_bound: likewise.
    importance_cap: likewise.
    evaluator: likewise.

  Raises:
    ValueError: if the student samples from another distribution than the
      teacher scores under.
  """
  _check_sampling(policy, teacher)
  balance.check(policy, balance_coef)
  repeat = policy_stages.repeat(group_size)
  generate = policy_stages.complete(policy, group_size)
  rescore = policy_stages.proximal_logp(policy, group_size)
  score = policy_stages.logp(teacher, 'teacher_logp', group_size)
  estimate = stages.Stage(teacher_advantage, 'teacher_advantage')
  gap = stages.Stage(teacher_gap, 'teacher_gap', 'sum', group_size=group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  padding = rollout_metrics.packed_padding(policy, group_size)
  minibatch = minibatches.minibatches(
    minibatch_by, num_minibatches, num_epochs, group_size
  )
  loss = objectives.policy(
    policy_stages.scorer(policy, group_size, balance=balance_coef > 0),
    balance_coef=balance_coef,
    clip=loss_terms.Clip(clip_low, clip_high),
    policy_loss=policy_loss,
    aggregate=aggregate,
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
    mask_truncated=mask_truncated,
  )
  learn = train_step.learner(
    loss, optimizer, group_size=group_size, divisible_groups=True
  )
  version = lambda state: train_step.version(state.actor)

  def init(key):
    actor = train_step.init(policy.init(key), optimizer)
    judge = verifiers.init(verify, jax.random.fold_in(key, 1))
    frozen = policy_stages.rounded(teacher, teacher.init(key))
    return State(actor, {base.FROZEN: frozen}, judge)

  def step(state: State, problem: base.Problem, key):
    actor, now, prompts = state.actor, version(state), repeat(problem)
    keys = stages.keys(key, prompts.prompt)
    prompts, x, _, _ = generate.run(now, (), prompts, keys)
    x = rescore(now, x)
    verdict = verifiers.judge(verify, state.verifier, prompts.answer, x)
    info = measure(x, verdict, actor.step)
    teacher_logp = score(state.teacher[base.FROZEN], x)
    logp = rollout_correction.old_logp(x)
    x = x._replace(advantage=estimate(teacher_logp, logp, x.mask))
    info |= gap(x.advantage, x.mask)
    batches = minibatch(key, prompts.prompt, x, ())
    info |= padding(batches)
    actor, learned = learn(actor, batches)
    return state._replace(actor=actor), info | learned

  return policy_stages.workflow(init, step, version, evaluator(policy, verify))


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


def teacher_gap(advantage_BT, mask_BT) -> base.Info:
  """KL(student‖teacher) of a token, estimated by k1, in nats."""
  return {'rollout/kl_teacher': metrics.mean(-advantage_BT, mask_BT)}
