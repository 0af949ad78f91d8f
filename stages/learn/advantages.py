"""Advantages of one trajectory or of one group of completions.

Use `jax.vmap` for several. `whiten` alone takes a whole minibatch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gae(reward_T, value_T, next_value_T, discount_T, continue_T, lambda_):
  """Generalized advantage estimation, arXiv:1506.02438 eq. 16.

    δₜ = rₜ + γₜ v′ₜ − vₜ
    Aₜ = δₜ + γₜ λ cₜ Aₜ₊₁

  The return to regress a critic on is Aₜ + vₜ. One trajectory may hold several
  episodes, one after the other.

  Args:
    reward_T: rₜ, received after the action at t.
    value_T: vₜ, the critic's estimate at t.
    next_value_T: v′ₜ, its estimate after the action at t: vₜ₊₁ within an
      episode, that of the final observation where the episode is truncated.
    discount_T: γₜ, zero only where the episode terminates after t.
    continue_T: cₜ, zero where the episode ends after t, in either way.
    lambda_: λ, from 0 (one step) to 1 (Monte Carlo).

  Returns:
    Aₜ.
  """
  delta_T = reward_T + discount_T * next_value_T - value_T
  decay_T = discount_T * lambda_ * continue_T

  def backward(advantage, step):
    delta, decay = step
    advantage = delta + decay * advantage
    return advantage, advantage

  # An associative scan takes longer to compile and, on CPU, to run.
  zero = jnp.zeros((), delta_T.dtype)
  return jax.lax.scan(backward, zero, (delta_T, decay_T), reverse=True)[1]


def token_gae(reward_T, value_T, mask_T, discount_T, lambda_):
  """Generalized advantage estimation of the policy's tokens in one row.

    δₜ = rₜ + γₜ vₜ′ − vₜ
    Aₜ = δₜ + γₜ λ Aₜ′,   v = A = 0 after the last token

  t′ is the policy's next token: tokens of an environment between two turns of a
  conversation are no actions, and are left out. The end of a row is terminal,
  also where a length limit cut it off. Advantages are zero where `mask_T` is,
  and what rewards and values hold there changes none.

  Args:
    reward_T: rₜ of each token, see `at_last_token`.
    value_T: vₜ, the critic's estimate before each token.
    mask_T: 1 on the policy's own tokens.
    discount_T: γₜ of each token; a number if it is the same for all.
    lambda_: λ.
  """

  def backward(later, step):
    reward, value, is_own, discount = step
    value_later, advantage_later = later
    delta = reward + discount * value_later - value
    advantage = delta + discount * lambda_ * advantage_later
    # Other tokens may hold anything, and ∞ · 0 is NaN.
    now = jax.tree.map(
      lambda new, old: jnp.where(is_own > 0, new, old),
      (value, advantage),
      later,
    )
    return now, jnp.where(is_own > 0, advantage, 0.0)

  zero = jnp.zeros((), value_T.dtype)
  discount_T = jnp.broadcast_to(discount_T, mask_T.shape).astype(value_T.dtype)
  steps = reward_T, value_T, mask_T, discount_T
  return jax.lax.scan(backward, (zero, zero), steps, reverse=True)[1]


def at_last_token(reward, mask_T):
  """Puts the reward of a completion on the policy's last token."""
  later_T = jnp.cumsum(mask_T[::-1])[::-1] - mask_T
  return jnp.where((mask_T > 0) & (later_T == 0), reward, 0.0)


def length_adaptive(alpha: float = 0.05) -> Callable:
  """Returns `length -> λ` of VAPO, arXiv:2504.05118 §4.2.

  λ = 1 − 1 / (α l), and not below 0

  Args:
    alpha: α; Σₜ λᵗ ≈ α l, the reach of a reward, is this share of the tokens.
  """
  return lambda length: jnp.maximum(1.0 - 1.0 / (alpha * length), 0.0)


def group_relative(reward_G):
  """Group-relative advantage, arXiv:2402.03300 §4.1.2.

    A = (R − mean R) / (std R + 10⁻⁶)

  The deviation is the unbiased one, and A is zero where all rewards are equal:
  there, the formula alone would divide rounding errors by 10⁻⁶.
  """
  _check_group('group_relative', reward_G)
  relative_G = group_centered(reward_G) / (jnp.std(reward_G, ddof=1) + 1e-6)
  return jnp.where(reward_G.max() == reward_G.min(), 0.0, relative_G)


def group_centered(reward_G):
  """Dr. GRPO's advantage, arXiv:2503.20783.   A = R − mean R"""
  _check_group('group_centered', reward_G)
  return reward_G - reward_G.mean()


def leave_one_out(reward_G):
  """RLOO's advantage, arXiv:2402.14740.   Aᵢ = Rᵢ − Σⱼ≠ᵢ Rⱼ / (G − 1)"""
  _check_group('leave_one_out', reward_G)
  G = reward_G.shape[0]
  return reward_G - (reward_G.sum() - reward_G) / (G - 1)


def no_baseline(reward_G):
  """The reward itself, as in REINFORCE.   A = R

  For batches that are whitened (REINFORCE++, arXiv:2501.03262), or rewards
  that a baseline was subtracted from (ReMax, arXiv:2310.10505).
  """
  return reward_G


def fill_rewards(reward_G, kept_G):
  """Replaces rewards that are not kept by the mean of those that are.

  So a completion without a reward does not move the mean of its group. The mean
  is 0 where none is kept.

  Args:
    reward_G: rewards; arbitrary where `kept_G` is 0.
    kept_G: 1 where there is a reward.
  """
  kept_G = kept_G > 0
  mean = jnp.where(kept_G, reward_G, 0.0).sum() / jnp.maximum(kept_G.sum(), 1)
  # Within its range: by rounding, the mean of equal rewards could differ.
  least = jnp.where(kept_G, reward_G, jnp.inf).min()
  most = jnp.where(kept_G, reward_G, -jnp.inf).max()
  mean = jnp.where(kept_G.any(), jnp.clip(mean, least, most), 0.0)
  return jnp.where(kept_G, reward_G, mean)


def reward_to_go(reward_T):
  """Sum of the rewards from each token on, undiscounted.   Gₜ = Σₛ≥ₜ rₛ"""
  return jnp.cumsum(reward_T[::-1])[::-1]


def _check_group(name, reward_G):
  G = reward_G.shape[0]
  if G < 2:
    raise ValueError(
      f'{name} compares the rewards of a group and was given a group of {G}: '
      'make groups of 2 or more (group_size; GROUP in gin).'
    )


def whiten(x, mask):
  """Shifts and scales to mean 0 and variance 1 where `mask` is 1; 0 elsewhere.

    (x − μ) / √(σ² + 10⁻⁸),   σ² = Σ m (x − μ)² / Σ m

  The moments are those of the whole minibatch, so a stage that calls this must
  have grain 'batch'.
  """
  count = jnp.maximum(mask.sum(), 1.0)
  centered = (x - (x * mask).sum() / count) * mask
  return centered * jax.lax.rsqrt((centered**2).sum() / count + 1e-8)
