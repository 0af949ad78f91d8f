"""Choice of completions to imitate: `reward_G, correct_G -> kept_G`."""

import jax.numpy as jnp


def correct(reward_G, correct_G):
  """All right ones, as in expert iteration and STaR, arXiv:2203.14465."""
  del reward_G
  return correct_G


def best(reward_G, correct_G):
  """The one of the highest reward, as in RAFT, arXiv:2304.06767.

  Of several, it is the first.
  """
  del correct_G
  return (jnp.arange(reward_G.shape[0]) == reward_G.argmax()).astype(
    reward_G.dtype
  )
