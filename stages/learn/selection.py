"""Choice of completions to imitate: `reward_G, correct_G -> kept_G`."""

import jax.numpy as jnp

TIE = 1e-5  # Rewards that differ by less are equal.


def correct(reward_G, correct_G):
  """Keeps correct completions (expert iteration; STaR, arXiv:2203.14465)."""
  del reward_G
  return correct_G


def best(reward_G, correct_G):
  """Keeps the completion with the highest reward, as in RAFT, arXiv:2304.06767.

  Of several whose rewards are equal within `TIE`, it is the first. At the first
  step a KL penalty is zero but for rounding, which differs between plans.
  """
  del correct_G
  first = (reward_G >= reward_G.max() - TIE).argmax()
  return (jnp.arange(reward_G.shape[0]) == first).astype(reward_G.dtype)
