"""Sampling of tokens from logits, and the log-probabilities of samples."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The distribution to sample tokens from.

  Attributes:
    temperature: divides the logits.
    top_k: number of most likely tokens to keep; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability
      reaches this.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    if self.temperature <= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
      raise ValueError(
        f'{self} is not a distribution: temperature must be above 0 (for '
        'greedy evaluations, leave it as it is), top_k 0 or more, top_p in '
        '(0, 1].'
      )


def shape(logit_BTV, sampling: Sampling, keep_BT=None):
  """Logits of the distribution that is sampled from, dropped tokens at −∞.

  Args:
    logit_BTV: logits of the model.
    sampling: temperature, top-k and top-p.
    keep_BT: tokens that are never dropped: samples, whose log-probability must
      stay finite after the parameters have changed.
  """
  logit_BTV = logit_BTV / sampling.temperature
  V = logit_BTV.shape[-1]
  if not 0 < sampling.top_k < V and sampling.top_p >= 1.0:
    return logit_BTV
  sorted_BTV = jnp.sort(logit_BTV, axis=-1, descending=True)
  kept_BTV = jnp.ones(logit_BTV.shape, bool)
  if 0 < sampling.top_k < V:
    kept_BTV &= logit_BTV >= sorted_BTV[..., sampling.top_k - 1][..., None]
    sorted_BTV = jnp.where(
      jnp.arange(V)[None, None] < sampling.top_k, sorted_BTV, -jnp.inf
    )
  if sampling.top_p < 1.0:
    # A token is kept if the more likely ones together are below top_p.
    share_BTV = jax.nn.softmax(sorted_BTV, axis=-1)
    before_BTV = jnp.cumsum(share_BTV, axis=-1) - share_BTV
    n_BT = (before_BTV < sampling.top_p).sum(-1)
    least_BT1 = jnp.take_along_axis(sorted_BTV, n_BT[..., None] - 1, axis=-1)
    kept_BTV &= logit_BTV >= least_BT1
  if keep_BT is not None:
    kept_BTV |= jnp.arange(V)[None, None] == keep_BT[..., None]
  return jnp.where(kept_BTV, logit_BTV, -jnp.inf)


def logp(logit_BTV, token_BT):
  """Log-probability of `token_BT`."""
  chosen_BT1 = jnp.take_along_axis(logit_BTV, token_BT[..., None], axis=-1)
  return chosen_BT1[..., 0] - jax.nn.logsumexp(logit_BTV, axis=-1)


def entropy(logit_BTV):
  """Entropy in nats; tokens at −∞ contribute 0."""
  logp_BTV = jax.nn.log_softmax(logit_BTV, axis=-1)
  # Select before multiplying: 0 · −∞ is NaN, and so is its gradient.
  finite_BTV = jnp.where(jnp.isfinite(logp_BTV), logp_BTV, 0.0)
  return -(jnp.exp(logp_BTV) * finite_BTV).sum(-1)


def draw(key_B, logit_BV):
  """Samples one token a row, each with its own key (Gumbel-max)."""
  return jax.vmap(jax.random.categorical)(key_B, logit_BV)
