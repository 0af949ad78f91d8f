"""Advantages of the turns of one group of conversations.

A group has G conversations of the same problem, of at most K turns each, or G
episodes from the same initial state, whose K steps are the turns. Use
`jax.vmap` for several groups.
"""

import jax
import jax.numpy as jnp

from stages import ranges
from stages.learn import advantages, signatures


def by_turn(discount: ranges.Fraction = 1.0) -> signatures.TurnAdvantage:
  """Compares each turn with the turns of the same number in its group.

    Aᵢₖ = (Gᵢₖ − mean Gₖ) / (std Gₖ + 10⁻⁶),   Gᵢₖ = Σₗ≥ₖ γˡ⁻ᵏ rᵢₗ

  The mean and the unbiased deviation are over the conversations that have a
  turn k. A is zero where it is the only one, or where all Gₖ are equal.

  Args:
    discount: γ, per turn.
  """

  def advantage(reward_GK, taken_GK, state_GK):
    del state_GK
    return_GK = returns(reward_GK, discount)
    turn_GK = jnp.broadcast_to(jnp.arange(taken_GK.shape[1]), taken_GK.shape)
    return _relative(return_GK, taken_GK, turn_GK)

  return advantage


def by_state(
  discount: ranges.Fraction = 0.95,
  weight: ranges.NonNegativeFloat = 1.0,
  advantage: signatures.GroupAdvantage = advantages.group_relative,
) -> signatures.TurnAdvantage:
  """GiGPO: also compares turns in equal states, arXiv:2505.10978 eq. 3 to 8.

    Aᵢₖ = A(Σₗ rᵢₗ) + ω (Gᵢₖ − mean G) / (std G + 10⁻⁶),   Gᵢₖ = Σₗ≥ₖ γˡ⁻ᵏ rᵢₗ

  The mean and the unbiased deviation are over all turns of the group, of any
  conversation and any number, that were taken in the same state. The second
  term is zero where a state occurs once, or where all its G are equal.

  Args:
    discount: γ, per turn.
    weight: ω, weight of the second term.
    advantage: A, `reward_G -> advantage_G`, of whole conversations.
  """

  def combined(reward_GK, taken_GK, state_GK):
    episode_G = advantage(reward_GK.sum(1))
    return_GK = returns(reward_GK, discount)
    turn_GK = _relative(return_GK, taken_GK, state_GK)
    return taken_GK * (episode_G[:, None] + weight * turn_GK)

  return combined


def returns(reward_GK, discount):
  """Discounted returns of each turn.   Gₖ = rₖ + γ Gₖ₊₁"""

  def backward(later_G, reward_G):
    now_G = reward_G + discount * later_G
    return now_G, now_G

  zero_G = jnp.zeros(reward_GK.shape[0], reward_GK.dtype)
  return jax.lax.scan(backward, zero_G, reward_GK.T, reverse=True)[1].T


def turn_of_token(mask_T):
  """Number of the turn, from 0, to which each of the policy's tokens belongs.

  Args:
    mask_T: 1 on the policy's tokens; those of an environment between them part
      turns. Other tokens have the number of the turn before them, and those
      before the first turn 0.
  """
  before_T = jnp.append(jnp.zeros((1,), mask_T.dtype), mask_T[:-1])
  starts_T = (mask_T > 0) & (before_T == 0)
  return jnp.maximum(jnp.cumsum(starts_T) - 1, 0)


def of_turns(reward_K, reward, mask_T):
  """Rewards of turns that add up to the reward of their conversation.

  What is left of `reward`, such as a penalty, belongs to the last turn.

  Args:
    reward_K: rewards that the environment gave.
    reward: the verifier's reward of the conversation.
    mask_T: as in `turn_of_token`.

  Returns:
    The rewards, and 1 for each turn with a token of the policy, both [K].
  """
  K = reward_K.shape[0]
  last = turn_of_token(mask_T)[-1]
  turn_K = jnp.arange(K)
  taken_K = (turn_K <= last) & (mask_T.max() > 0)
  reward_K = jnp.where(taken_K, reward_K, 0.0)
  rest = reward - reward_K.sum()
  reward_K += jnp.where(taken_K & (turn_K == last), rest, 0.0)
  return reward_K, taken_K.astype(reward_K.dtype)


def on_last_tokens(reward_K, mask_T):
  """Puts the reward of each turn on its last token; 0 on all others."""
  after_T = jnp.append(mask_T[1:], jnp.zeros((1,), mask_T.dtype))
  is_last_T = (mask_T > 0) & (after_T == 0)
  return jnp.where(is_last_T, reward_K[turn_of_token(mask_T)], 0.0)


def _relative(x_GK, taken_GK, same_GK):
  """`x` standardized among the taken turns with the same number in `same`."""
  x_N, taken_N, same_N = (x.reshape(-1) for x in (x_GK, taken_GK, same_GK))
  N = x_N.shape[0]
  order_N = jnp.argsort(same_N)
  sorted_N = same_N[order_N]
  is_new_N = jnp.append(jnp.zeros(1, bool), sorted_N[1:] != sorted_N[:-1])
  set_N = jnp.zeros(N, int).at[order_N].set(jnp.cumsum(is_new_N))

  def total(x_N):
    return jax.ops.segment_sum(x_N, set_N, N)[set_N]

  count_N = total(taken_N)
  mean_N = total(taken_N * x_N) / jnp.maximum(count_N, 1.0)
  centered_N = taken_N * (x_N - mean_N)
  deviation_N = jnp.sqrt(total(centered_N**2) / jnp.maximum(count_N - 1.0, 1.0))
  # Of equal returns, the formula would divide rounding errors by 10⁻⁶.
  high_N = jax.ops.segment_max(jnp.where(taken_N > 0, x_N, -jnp.inf), set_N, N)
  low_N = jax.ops.segment_min(jnp.where(taken_N > 0, x_N, jnp.inf), set_N, N)
  differs_N = (high_N > low_N)[set_N]
  relative_N = jnp.where(differs_N, centered_N / (deviation_N + 1e-6), 0.0)
  return relative_N.reshape(x_GK.shape)
