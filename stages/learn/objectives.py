"""Losses of policies, from terms that workflows choose."""

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from stages import base, metrics
from stages.learn import (
  loss_terms,
  losses,
  rollout_correction,
  signatures,
  train_step,
)


def policy(
  evaluate: Callable,
  *,
  clip: loss_terms.Clip = loss_terms.Clip(),
  kl: loss_terms.KlPenalty = loss_terms.KlPenalty(),
  entropy_coef: float = 0.0,
  balance_coef: float = 0.0,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  likelihood: signatures.Likelihood = losses.token_logp,
  aggregate: signatures.Aggregate = losses.sequence_mean_token_mean,
  importance: loss_terms.Importance = loss_terms.Importance(),
  mask_truncated: bool = False,
  critic_loss: Callable | None = None,
) -> Callable:
  """Returns the loss `params, experience, ref_logp_BT -> Loss`.

    L = aggregate(w · policy_loss(lp, lp_old, A) + β KL(lp, lp_ref) − η H + c b
                  + L_critic)

  H is the entropy, b the load-balancing loss of a mixture of experts, and
  L_critic is 0 without `critic_loss`. lp_old are the log-probabilities recorded
  while sampling, and w = 1. Where the experience has `proximal`
  log-probabilities, these are lp_old, and w is the bounded importance weight
  exp(lp_old − lp_b) of them over the recorded ones, lp_b.

  Args:
    evaluate: `params, experience -> base.Evaluation`.
    clip: range of the ratio, and the bound of dual clip.
    kl: β and the estimator of the KL divergence.
    entropy_coef: η, weight of the entropy bonus.
    balance_coef: c, weight of the balance, which `evaluate` then returns.
    policy_loss: as in `workflows.grpo`, like the next two.
    likelihood: of tokens or of sequences.
    aggregate: of the loss of all tokens.
    importance: w and its bound.
    mask_truncated: whether completions at the length limit are left out.
    critic_loss: `value_BT, experience -> loss_BT, info`, added for a critic
      that `evaluate` computes; None without one.

  Raises:
    ValueError: for dual clip with another loss than `losses.ppo_clip`, and for
      bounds that `loss_terms.check` refuses.
  """
  clipped = surrogate(clip, importance, policy_loss, likelihood)

  def loss(params, x: base.Experience, ref_logp_BT):
    if mask_truncated:
      x = x._replace(mask=finished_mask(x.mask, x.truncated))
    now = evaluate(params, x)
    # Scores of padding are arbitrary, and ∞ · 0 is NaN.
    now = now._replace(
      logp=jnp.where(x.mask > 0, now.logp, 0.0),
      entropy=jnp.where(x.mask > 0, now.entropy, 0.0),
    )
    loss_BT, ratio_info = clipped(now.logp, x)
    info = {
      'train/policy_loss': aggregate(loss_BT, x.mask),
      'train/kl_behavior': metrics.mean(losses.kl_k3(x.logp, now.logp), x.mask),
      # The exact entropy costs a pass over the vocabulary. −lp of the tokens,
      # as they were sampled, estimates it.
      'train/entropy': metrics.mean(
        now.entropy if entropy_coef else -x.logp, x.mask
      ),
    }
    kl_BT, kl_info = _kl_term(kl, now.logp, ref_logp_BT, x.mask)
    balance_BT, balance_info = balance_term(
      balance_coef, now, x.mask, aggregate
    )
    loss_BT += kl_BT + balance_BT
    info |= ratio_info | kl_info | balance_info
    if entropy_coef:
      loss_BT -= entropy_coef * now.entropy
    if critic_loss:
      value_loss_BT, value_info = critic_loss(now.value, x)
      loss_BT += value_loss_BT
      info |= value_info
    mean = aggregate(loss_BT, x.mask)
    return train_step.Loss((mean,), info, count=x.mask.sum())

  return loss


def finished_mask(mask_BT, truncated_B):
  """`mask_BT`, 0 also on completions that reached the length limit."""
  return mask_BT * (1.0 - truncated_B[:, None])


def _with_dual_clip(
  policy_loss: signatures.PolicyLoss, dual_clip: float | None
) -> Callable:
  """The loss bounded by `dual_clip`, or as it is for None."""
  if dual_clip is None:
    return policy_loss
  # Gin wraps the functions that recipes name.
  if inspect.unwrap(policy_loss) is not losses.ppo_clip:
    raise ValueError(
      'dual_clip bounds losses.ppo_clip alone: leave it out with another '
      'policy_loss.'
    )
  return functools.partial(policy_loss, dual_clip=dual_clip)


def surrogate(
  clip: loss_terms.Clip,
  importance: loss_terms.Importance,
  policy_loss: signatures.PolicyLoss = losses.ppo_clip,
  likelihood: signatures.Likelihood = losses.token_logp,
) -> Callable:
  """Returns `logp, experience -> loss, info`: the loss of ρ = π / π_old.

  It is w · policy_loss(lp, lp_old, A) of each action; arguments, w and lp_old
  are those of `policy`.
  """
  loss_terms.check(clip, importance)
  bounded = _with_dual_clip(policy_loss, clip.dual)
  bounds = clip.low, clip.high

  def loss(logp, x: base.Experience):
    old = x.logp
    if x.proximal is not None:
      old = jnp.where(x.mask > 0, x.proximal, 0.0)
    logp, old = (likelihood(lp, x.mask) for lp in (logp, old))
    ratio = losses.ratio(logp, old)
    clipped = losses.clip_fraction(logp, old, x.advantage, *bounds)
    info = {
      'train/clip_fraction': metrics.mean(clipped, x.mask),
      'train/ratio_mean': metrics.mean(ratio, x.mask),
      'train/ratio_max': metrics.maximum(ratio, x.mask),
    }
    if clip.dual is not None:
      dual = losses.dual_clip_fraction(logp, old, x.advantage, clip.dual)
      info['train/clip_fraction_dual'] = metrics.mean(dual, x.mask)
    loss = bounded(logp, old, x.advantage, *bounds)
    return rollout_correction.weigh(loss, importance, x), info

  return loss


def _kl_term(
  kl: loss_terms.KlPenalty, logp_BT, ref_logp_BT, mask_BT
) -> tuple[Any, base.Info]:
  """The KL term of a loss, [B, T], and its metric, if there is a reference."""
  info = {}
  if jax.tree.leaves(ref_logp_BT):
    ref_logp_BT = jnp.where(mask_BT > 0, ref_logp_BT, 0.0)
    info['train/kl_reference'] = metrics.mean(
      losses.kl_k3(logp_BT, ref_logp_BT), mask_BT
    )
  if not kl.coef:
    return 0.0, info
  return kl.coef * kl.estimator(logp_BT, ref_logp_BT), info


def balance_term(
  coef: float, now: base.Evaluation, mask_BT, aggregate: signatures.Aggregate
) -> tuple[Any, base.Info]:
  """The term of a loss that balances experts, [B, T], and its metrics.

  Args:
    coef: its weight; 0 for no term.
    now: an evaluation with `balance`, where there is a term.
    mask_BT: 1 on the tokens of the loss.
    aggregate: of the loss.
  """
  if not coef:
    return 0.0, {}
  info = {
    'train/balance_loss': aggregate(now.balance.loss, mask_BT),
    'train/expert_load': metrics.Load(now.balance.load),
  }
  return coef * now.balance.loss, info
