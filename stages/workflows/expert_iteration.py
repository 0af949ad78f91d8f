"""Expert iteration: maximum likelihood of the policy's own best completions."""

import functools
import inspect

import jax
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
from stages.language.scoring import balance
from stages.learn import (
  loss_terms,
  losses,
  minibatches,
  objectives,
  rollout_correction,
  selection,
  signatures,
  train_step,
)


def expert_iteration(
  policy: base.Policy,
  verify: stages.Stage | verifiers.LearnedVerifier,
  optimizer: optax.GradientTransformation,
  *,
  group_size: ranges.PositiveInt,
  keep: signatures.GroupSelection = selection.correct,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  kl_reward_coef: ranges.NonNegativeFloat = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  balance_coef: ranges.NonNegativeFloat = 0.0,
  mask_truncated: bool = False,
  staleness: ranges.NonNegativeInt = 0,
  importance_weight: signatures.ImportanceWeight | None = None,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  rollouts: policy_stages.RolloutMethod = policy_stages.complete,
  evaluator: evaluate_lib.Evaluator = evaluate_lib.evaluate,
) -> base.Workflow:
  """Samples completions, selects the correct or the best, and imitates them.

    L = −Σ k m w lp / Σ k m + β KL

  k is 1 on the tokens of selected completions and else 0, m is 1 on real tokens
  and 0 on padding. w = 1: completions are examples, also those of an older
  version of the policy. The first update of a step is that of REINFORCE with
  rewards k and without a baseline, up to the denominator; with importance
  weights w, also where another engine or an older version sampled.

  Args:
    policy: the language model to train.
    verify: as in `grpo`.
    optimizer: optimizer of the parameters.
    group_size: n, completions of each prompt.
    keep: `reward_G, correct_G -> kept_G` of one group: `selection.correct` is
      expert iteration, `selection.best` is best-of-n.
    kl_coef: β, weight of the KL to the initial policy on the same tokens; if it
      and `kl_reward_coef` are 0, no reference is kept.
    kl_estimator: as in `grpo`.
    kl_reward_coef: weight of a KL penalty in place of the KL term: the sum of
      `kl_reward_coef` (lp − lp_ref) over a completion is subtracted from the
      reward that `keep` compares, as in RAFT, arXiv:2304.06767.
    num_minibatches: minibatches of a batch, one update each.
    num_epochs: passes over each batch, shuffled anew in each.
    balance_coef: as in `grpo`.
    mask_truncated: likewise.
    staleness: likewise.
    importance_weight: as in `grpo`; None for w = 1.
    importance_bound: as in `grpo`.
    importance_cap: likewise.
    rollouts: likewise.
    evaluator: likewise.

  Raises:
    ValueError: for a KL term and a KL penalty at once, or for a penalty on
      rewards that `selection.correct` does not read.
  """
  balance.check(policy, balance_coef)
  has_kl = loss_terms.needs_reference(kl_coef, kl_reward_coef)
  _check_penalty(kl_reward_coef, keep)
  repeat = policy_stages.repeat(group_size)
  generate = rollouts(policy, group_size)
  rescore = lambda now, x: x
  if importance_weight:
    rescore = policy_stages.proximal_logp(
      policy, group_size, staleness, generate
    )
  measure = rollout_metrics.measure(group_size, num_minibatches * num_epochs)
  select = select_stage(keep, group_size, kl_reward_coef)
  count = stages.Stage(count_kept, 'count_kept', 'sum', group_size=group_size)
  score_ref = policy_stages.ref_logp(policy, group_size, has_kl)
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
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
    mask_truncated=mask_truncated,
  )
  learn = train_step.learner(
    loss, optimizer, group_size=group_size, divisible_groups=True
  )
  version = lambda state: train_step.version(state.actor)
  init = functools.partial(
    policy_update.init_state, policy, verify, optimizer, has_kl, staleness
  )

  def step(state: policy_update.State, problem: base.Problem, key):
    behavior, past = train_step.delayed(state.past, version(state))
    prompts = repeat(problem)
    finished, x, carry, carry_info = generate.run(
      behavior, state.carry, prompts, stages.keys(key, prompts.prompt)
    )
    x = rescore(version(state), x)
    verdict = verifiers.judge(verify, state.verifier, finished.answer, x)
    info = measure(x, verdict, state.actor.step) | carry_info
    ref_logp = score_ref(state.reference, version(state), x)
    logps = (rollout_correction.old_logp(x), ref_logp) if kl_reward_coef else ()
    kept = select(verdict, x.mask, *logps)
    info |= count(kept, x.mask)
    x = x._replace(mask=kept, advantage=kept)
    batches = minibatch(key, prompts.prompt, x, ref_logp)
    info |= padding(batches)
    actor, learned = learn(state.actor, batches)
    return state._replace(actor=actor, past=past, carry=carry), info | learned

  return policy_stages.workflow(
    init, step, version, evaluator(policy, verify), generate, staleness
  )


def _check_penalty(kl_reward_coef: float, keep: signatures.GroupSelection):
  # Gin wraps the functions that recipes name.
  if kl_reward_coef and inspect.unwrap(keep) is selection.correct:
    raise ValueError(
      f'kl_reward_coef = {kl_reward_coef} lowers rewards, and '
      'selection.correct keeps all correct completions, whatever their '
      'reward: use keep = selection.best, or kl_coef in its place.'
    )


def select_stage(
  keep: signatures.GroupSelection, group_size: int, kl_coef: float = 0.0
) -> stages.Stage:
  """Returns a stage `verdict, mask_BT, *logps -> mask_BT`, 1 where kept.

  A completion whose reward failed has a reward of 0, which may be above those
  of the others. It is never kept, nor is a row without a token.

  Args:
    keep: as in `expert_iteration`.
    group_size: completions of each prompt.
    kl_coef: weight of a KL penalty on rewards. If it is not 0, `logps` are
      log-probabilities of the policy and of the reference.
  """

  @stages.stage('select', group_size=group_size)
  def select(verdict: base.Verdict, mask_BT, *logps):
    reward_B = verdict.reward
    if kl_coef:
      kl_BT = jnp.where(mask_BT > 0, losses.kl_k1(*logps), 0.0)
      reward_B -= kl_coef * kl_BT.sum(1)
    failed_B = dict(verdict.terms).get(verifiers.FAILED, 0.0)
    judged_B = (mask_BT.max(1) > 0) & (jnp.asarray(failed_B) == 0)
    kept_NG = jax.vmap(functools.partial(_keep_judged, keep))(
      reward_B.reshape(-1, group_size),
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
