"""Expert iteration: maximum likelihood of the policy's own best completions."""

import functools
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
  selection,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained.
    reference: its initial parameters, without frozen ones; `()` where there is
      no KL term.
    verifier: parameters of a learned verifier; `()` for others.
  """

  actor: base.TrainState
  reference: base.Params
  verifier: base.Params = ()


def expert_iteration(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  keep: signatures.GroupSelection = selection.correct,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Samples completions, selects the correct or the best, and imitates them.

    L = −Σ k m lp / Σ k m + β KL

  k is 1 on the tokens of selected completions and else 0, m is 1 on real tokens
  and 0 on padding. The first update of a step is that of REINFORCE with rewards
  k and without a baseline, up to the denominator.

  Args:
    policy: the language model to train.
    verify: as in `grpo`.
    optimizer: optimizer of the parameters.
    group_size: n, completions of each prompt.
    keep: `reward_G, correct_G -> kept_G` of one group: `selection.correct` is
      expert iteration, `selection.best` is best-of-n.
    kl_coef: β, weight of the KL to the initial policy on the same tokens; if it
      is 0, no reference is kept.
    kl_estimator: as in `grpo`.
    num_minibatches: minibatches of a batch, one update each.
    num_epochs: passes over each batch, shuffled anew in each.
    balance_coef: as in `grpo`.
    mask_truncated: likewise.
    evaluator: likewise.
  """
  balance.check(policy, balance_coef)
  repeat = policy_stages.repeat(group_size)
  generate = policy_stages.act(policy, 'generate', group_size=group_size)
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  select = select_stage(keep, group_size)
  count = stages.Stage(count_kept, 'count_kept', 'sum', group_size=group_size)
  score_ref = policy_stages.ref_logp(policy, group_size, bool(kl_coef))
  padding = rollout_metrics.packed_padding(policy, group_size)
  minibatch = minibatches.minibatches(
    'shuffled', num_minibatches, num_epochs, group_size
  )
  loss = objectives.policy(
    policy_stages.scorer(policy, group_size, balance=balance_coef > 0),
    balance_coef=balance_coef,
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    policy_loss=lambda logp, old, kept, *clip: losses.reinforce(logp, kept),
    aggregate=losses.token_mean,
    mask_truncated=mask_truncated,
  )
  learn = train_step.learner(
    loss, optimizer, group_size=group_size, divisible_groups=True
  )
  version = lambda state: train_step.version(state.actor)

  def init(key):
    actor = train_step.init(policy.init(key), optimizer)
    judge = verifiers.init(verify, jax.random.fold_in(key, 1))
    reference = ()
    if kl_coef:
      reference = policy_stages.reference(policy, actor.params)
    return State(actor, reference, judge)

  def step(state: State, problem: base.Problem, key):
    actor, now, problem = state.actor, version(state), repeat(problem)
    keys = stages.keys(key, problem.prompt)
    x = generate(now, problem.prompt, keys)
    verdict = verifiers.judge(verify, state.verifier, problem.answer, x)
    info = measure(x, verdict, actor.step)
    kept = select(verdict, x.mask)
    info |= count(kept, x.mask)
    ref_logp = score_ref(state.reference, now, x)
    x = x._replace(mask=kept, advantage=kept)
    batches = minibatch(key, problem.prompt, x, ref_logp)
    info |= padding(batches)
    actor, learned = learn(actor, batches)
    return state._replace(actor=actor), info | learned

  return policy_stages.workflow(init, step, version, evaluator(policy, verify))


def select_stage(
  keep: signatures.GroupSelection, group_size: int
) -> stages.Stage:
  """Returns a stage `verdict, mask_BT -> mask_BT`, 1 on kept completions.

  A completion whose reward failed has a reward of 0, which may be above those
  of the others. It is never kept, nor is a row without a token.
  """

  @stages.stage('select', group_size=group_size)
  def select(verdict: base.Verdict, mask_BT):
    failed_B = dict(verdict.terms).get(verifiers.FAILED, 0.0)
    judged_B = (mask_BT.max(1) > 0) & (jnp.asarray(failed_B) == 0)
    kept_NG = jax.vmap(functools.partial(_keep_judged, keep))(
      verdict.reward.reshape(-1, group_size),
      verdict.correct.reshape(-1, group_size),
      judged_B.reshape(-1, group_size),
    )
    return jnp.where(mask_BT > 0, kept_NG.reshape(-1, 1), 0.0)

  return select


def _keep_judged(
  keep: signatures.GroupSelection, reward_G, correct_G, judged_G
):
  """Selects rows of a group by `keep`, and none without a verdict.

  `keep` is shown such rows last, wrong and with the least reward of the others,
  so that it takes another one first.
  """
  order_G = jnp.argsort(~judged_G, stable=True)
  least = jnp.where(judged_G, reward_G, jnp.inf).min()
  least = jnp.where(judged_G.any(), least, 0.0)
  kept_G = keep(
    jnp.where(judged_G, reward_G, least)[order_G],
    jnp.where(judged_G, correct_G, 0.0)[order_G],
  )
  return jnp.where(judged_G, kept_G[jnp.argsort(order_G)], 0.0)


def count_kept(kept_BT, mask_BT) -> base.Info:
  """Metric of the share of completions that are kept."""
  return {'rollout/kept': metrics.mean(kept_BT.max(1), mask_BT.max(1))}
