"""Loss terms, to be minimized, and how they are averaged.

A term takes arrays of one shape, one number a token, and returns that shape.
Weight terms and add them up, then `aggregate` once. The result is a
`metrics.Mean`: its sum is the numerator and its count this batch's share of the
denominator, which belongs to the whole minibatch, so that the means of pieces
merge to the mean of the whole.

Log-probabilities: `logp` by the policy being updated, `old_logp` by the policy
before the update, `behavior_logp` by the policy or engine that sampled the
tokens, `ref_logp` by a reference policy.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
import optax

from stages import metrics, ranges

# Log-ratios beyond this are cut, so that exp(20) = 5e8 is the largest ratio.
_MAX_LOG_RATIO = 20.0


def ratio(logp, old_logp):
  """Probability ratio, ρ = exp(clip(lp − lp_old, ±20)), finite in float32."""
  return jnp.exp(jnp.clip(logp - old_logp, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def ppo_clip(logp, old_logp, advantage, clip_low, clip_high, dual_clip=None):
  """Clipped surrogate, arXiv:1707.06347 eq. 7.

    L = max(−ρ A, −clip(ρ, 1 − ε_low, 1 + ε_high) A)

  Args:
    logp: lp.
    old_logp: lp_old.
    advantage: A.
    clip_low: ε_low, how far the ratio may fall below 1.
    clip_high: ε_high, how far it may rise above 1; above `clip_low` in DAPO's
      clip-higher, arXiv:2503.14476.
    dual_clip: c > 1. Where A < 0, L is at most −c A (arXiv:1912.09729).
  """
  loss = _clipped(ratio(logp, old_logp), advantage, clip_low, clip_high)
  if dual_clip is None:
    return loss
  return jnp.where(
    advantage < 0, jnp.minimum(loss, -dual_clip * advantage), loss
  )


def _clipped(ratio, advantage, clip_low, clip_high):
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return jnp.maximum(-ratio * advantage, -clipped * advantage)


def token_logp(logp, mask):
  """Each token's own log-probability: ratios are of tokens, as PPO has it."""
  del mask
  return logp


def sequence_logp(logp_BT, mask_BT):
  """Mean log-probability of a row's tokens, on every token, arXiv:2507.18071.

    log π(y|x) / |y| = Σₜ m lpₜ / Σₜ m

  A ratio of two of them is GSPO's, s = exp(meanₜ(lp − lp_old)), which
  `ppo_clip` clips for the whole sequence. The loss is then the same on every
  token of a row, so that `sequence_mean_token_mean` is the paper's mean.
  """
  return _row_mean(logp_BT, mask_BT)


def sequence_sum_logp(logp_BT, mask_BT):
  """Log-probability of a row's completion, on every token, arXiv:2402.14740.

    log π(y|x) = Σₜ m lpₜ

  The completion is one action, whose ratio `ppo_clip` clips. As for
  `sequence_logp`, `sequence_mean_token_mean` is the mean over completions.
  """
  return _row_sum(logp_BT, mask_BT)


def cispo(logp, old_logp, advantage, clip_low, clip_high):
  """REINFORCE weighted by the clipped ratio, arXiv:2506.13585 eq. 4.

    L = −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) A lp

  The gradient of no token is cut. The paper has no lower bound: ε_low = 1.
  """
  weight = jnp.clip(ratio(logp, old_logp), 1.0 - clip_low, 1.0 + clip_high)
  return -jax.lax.stop_gradient(weight) * advantage * logp


def reinforce(logp, advantage):
  """Policy gradient.   L = −A lp"""
  return -advantage * logp


def clip_fraction(logp, old_logp, advantage, clip_low, clip_high):
  """One where `ppo_clip` cuts the gradient.

    ρ < 1 − ε_low and A < 0,   or   ρ > 1 + ε_high and A > 0

  Measured on the raw ratio. With `advantage` None, one wherever the ratio is
  out of bounds.
  """
  raw = jnp.exp(logp - old_logp)
  fell, rose = raw < 1.0 - clip_low, raw > 1.0 + clip_high
  if advantage is not None:
    fell, rose = fell & (advantage < 0), rose & (advantage > 0)
  return (fell | rose).astype(logp.dtype)


def dual_clip_fraction(logp, old_logp, advantage, dual_clip):
  """One where the dual clip cuts the gradient: ρ > c and A < 0."""
  raw = jnp.exp(logp - old_logp)
  return ((raw > dual_clip) & (advantage < 0)).astype(logp.dtype)


def kl_k1(logp, ref_logp):
  """Estimates KL(π‖π_ref) without bias, joschu.net/blog/kl-approx.html.

  k1 = Δ,   Δ = lp − lp_ref

  The mean of its gradient is zero, so that as a term of a loss it adds noise
  alone: it is for penalties in the reward.
  """
  return logp - ref_logp


def kl_k2(logp, ref_logp):
  """Estimates KL(π‖π_ref) with an unbiased gradient, ibid.

  k2 = ½ Δ²,   Δ = lp − lp_ref
  """
  return 0.5 * (logp - ref_logp) ** 2


def kl_k3(logp, ref_logp):
  """Estimates KL(π‖π_ref) without bias and never below zero, ibid.

  k3 = exp(−Δ) − 1 + Δ,   Δ = lp − lp_ref

  Below Δ = −20, it continues along its tangent, a lower bound as k3 is convex:

    k3(−20) + (1 − exp(20)) (Δ + 20)

  Value and gradient are continuous at −20 and finite in float32, where exp(−Δ)
  overflows at Δ ≈ −88.
  """
  delta = logp - ref_logp
  is_far = delta < -_MAX_LOG_RATIO
  # Select before taking exp: ∞ · 0 is NaN in the gradient.
  near = jnp.where(is_far, -_MAX_LOG_RATIO, delta)
  # By expm1: in float32, exp(−Δ) − 1 is below −Δ for small Δ.
  k3 = jnp.expm1(-near) + near
  slope = -math.expm1(_MAX_LOG_RATIO)
  return jnp.where(is_far, k3 + slope * (delta + _MAX_LOG_RATIO), k3)


def token_weight(old_logp, behavior_logp, mask):
  """Importance weight of each token, w = sg(exp(lp_old − lp_b)); 1 on padding.

  The weight of decoupled PPO (arXiv:2505.24298 eq. 5), which also corrects for
  an inference engine that computes other log-probabilities than the trainer.
  Apply it once, bounded by `truncated` or `masked`.
  """
  gap = _gap(old_logp, behavior_logp, mask)
  return jax.lax.stop_gradient(jnp.exp(gap))


def sequence_weight(old_logp_BT, behavior_logp_BT, mask_BT):
  """Importance weight of a row, the product of its tokens', on every token."""
  gap_BT = _row_sum(_gap(old_logp_BT, behavior_logp_BT, mask_BT), mask_BT)
  return jax.lax.stop_gradient(jnp.exp(gap_BT))


def geometric_weight(old_logp_BT, behavior_logp_BT, mask_BT):
  """Geometric mean of a row's token weights, on every token."""
  gap_BT = _row_mean(_gap(old_logp_BT, behavior_logp_BT, mask_BT), mask_BT)
  return jax.lax.stop_gradient(jnp.exp(gap_BT))


def _gap(old_logp, behavior_logp, mask):
  """lp_old − lp_b; 0 on padding, where either may be infinite."""
  return jnp.where(mask > 0, old_logp - behavior_logp, 0.0)


def truncated(weight, importance_cap):
  """Bounds importance weights from above: min(w, C), C is the cap."""
  return jnp.minimum(weight, importance_cap)


def masked(weight, importance_cap):
  """Sets weights out of [1/C, C] to zero; their tokens still count in means."""
  kept = (weight >= 1.0 / importance_cap) & (weight <= importance_cap)
  return jnp.where(kept, weight, 0.0)


def value_clip(value, old_value, return_, clip):
  """Critic's loss with clipped updates, as in OpenAI Baselines' PPO2.

  L = ½ max((V − R)², (V_old + clip(V − V_old, ±c) − R)²)
  """
  near = old_value + jnp.clip(value - old_value, -clip, clip)
  return 0.5 * jnp.maximum((value - return_) ** 2, (near - return_) ** 2)


def huber(value, return_, delta):
  """Critic's loss: ½ (V − R)² where |V − R| ≤ δ, δ (|V − R| − ½ δ) beyond."""
  return optax.losses.huber_loss(value, return_, delta=delta)


def preference(margin, label_smoothing=0.0):
  """DPO's loss of a pair of completions, arXiv:2305.18290 eq. 7.

    L = −(1 − ε) log σ(m) − ε log σ(−m)

  Args:
    margin: m, by how much the implicit reward β log(π/π_ref) of the preferred
      completion is above that of the other one.
    label_smoothing: ε, the share of preferences that are the wrong way round.
  """
  right = (1.0 - label_smoothing) * jax.nn.log_sigmoid(margin)
  return -right - label_smoothing * jax.nn.log_sigmoid(-margin)


def token_mean(loss, mask) -> metrics.Mean:
  """Σ m L / Σ m: every token weighs the same."""
  return metrics.mean(loss, mask)


def sequence_mean_token_mean(loss_BT, mask_BT) -> metrics.Mean:
  """Mean over rows of means over tokens; a row without tokens counts as 0."""
  loss_B = (loss_BT * mask_BT).sum(1) / jnp.maximum(mask_BT.sum(1), 1.0)
  return metrics.mean(loss_B)


def sequence_mean_token_sum(loss_BT, mask_BT) -> metrics.Mean:
  """Mean over rows of sums over tokens; a row without tokens counts as 0."""
  return metrics.mean((loss_BT * mask_BT).sum(1))


def constant(length: ranges.PositiveInt) -> Callable[..., metrics.Mean]:
  """Returns Σ m L / (B · `length`), Dr. GRPO's mean, arXiv:2503.20783.

  Args:
    length: tokens that a row may have at most.
  """

  def aggregate(loss_BT, mask_BT) -> metrics.Mean:
    total = (loss_BT * mask_BT).sum()
    return metrics.Mean(
      total, jnp.full((), loss_BT.shape[0] * length, total.dtype)
    )

  return aggregate


def _row_sum(x_BT, mask_BT):
  """Σₜ m x of each row, on every token of it."""
  sum_B1 = (x_BT * mask_BT).sum(1, keepdims=True)
  return jnp.broadcast_to(sum_B1, x_BT.shape)


def _row_mean(x_BT, mask_BT):
  """Σₜ m x / Σₜ m of each row, on every token of it."""
  count_B1 = jnp.maximum(mask_BT.sum(1, keepdims=True), 1.0)
  return _row_sum(x_BT, mask_BT) / count_B1
