"""Choice of completions to imitate: `reward_G, correct_G -> kept_G`."""

import jax.numpy as jnp


def correct(reward_G, correct_G):
  """Keeps correct completions (expert iteration; STaR, arXiv:2203.14465)."""
  del reward_G
  return correct_G


def best(reward_G, correct_G):
  """Keeps the completion with the highest reward, as in RAFT, arXiv:2304.06767.

  Of several, it is the first.
  """
  del correct_G
  return (jnp.arange(reward_G.shape[0]) == reward_G.argmax()).astype(
    reward_G.dtype
  )
