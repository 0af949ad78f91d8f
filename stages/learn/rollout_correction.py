"""Correction of actions whose sampler computed other log-probabilities.

The proximal policy is the one before an update, as the trainer computes it.
Ratios are clipped around it, and the loss of each action is multiplied by the
bounded ratio π_proximal / π_behavior (decoupled PPO, arXiv:2505.24298 eq. 5).
The weight also corrects for other numerics, where vLLM or bfloat16 computed the
log-probabilities of the sampler (truncated importance sampling).
"""

from collections.abc import Callable
import functools

import jax.numpy as jnp

import stages
from stages import base, granularity, metrics
from stages.envs.rollouts import obs_stats
from stages.learn import loss_terms


def is_needed(policy: base.Policy, is_stale: bool = False) -> bool:
  """Whether recorded log-probs may differ from those before an update.

  Args:
    policy: the policy.
    is_stale: whether actions are sampled by older parameters than those before
      the update.
  """
  return is_stale or policy.recompute_logp or policy.out_shapes is not None


def old_logp(x: base.Experience):
  """lp_old: proximal log-probabilities, or those recorded, which equal them."""
  return x.logp if x.proximal is None else x.proximal


def weigh(loss, importance: loss_terms.Importance, x: base.Experience):
  """The loss of each action, times its bounded importance weight, if any."""
  if x.proximal is None:
    return loss
  weight = importance.weight(x.proximal, x.logp, x.mask)
  return loss * importance.bound(weight, importance.cap)


def logprob_gap(x: base.Experience) -> base.Info:
  """Distance between log-probs of scoring and of sampling, nats an action."""
  if x.proximal is None:
    return {}
  x = granularity.by_row(x)
  gap = jnp.where(x.mask > 0, jnp.abs(x.proximal - x.logp), 0.0)
  return {
    'rollout/logprob_gap_mean': metrics.mean(gap, x.mask),
    'rollout/logprob_gap_max': metrics.maximum(gap),
  }


def logp_of_steps(policy: base.Policy, params, stats, obs, action):
  """Log-probabilities of actions in environments, [B, T] or more.

  Args:
    policy: the policy.
    params: its parameters.
    stats: statistics of observations, by which they are normalized.
    obs: observations before the actions.
    action: the actions.
  """
  return policy.evaluate(params, obs_stats.normalize(stats, obs), action).logp


def in_environments(policy: base.Policy) -> Callable:
  """Returns `params, obs_stats, experience -> experience, info`.

  Adds proximal log-probabilities of steps in environments, and the metrics of
  `logprob_gap`; nothing where the recorded ones equal them.
  """
  if not is_needed(policy):
    return lambda params, stats, x: (x, {})
  score = stages.Stage(
    functools.partial(logp_of_steps, policy),
    'proximal_logp',
    unbatched=(0, 1),
    rounds=policy.rounds,
  )
  measure_gap = stages.Stage(logprob_gap, 'logprob_gap', 'sum')

  def run(params, stats, x: base.Experience):
    x = x._replace(proximal=score(params, stats, x.obs, x.action))
    # Without observations: pictures would be sent to where metrics are.
    return x, measure_gap(x._replace(obs=(), action=()))

  return run
