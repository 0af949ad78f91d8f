"""Sampling of tokens from logits, and the log-probabilities of samples."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stages import base, ranges


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The distribution to sample tokens from.

  Attributes:
    temperature: divides the logits.
    top_k: number of most likely tokens to keep; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability
      reaches this.
  """

  temperature: ranges.PositiveFloat = 1.0
  top_k: int = 0
  top_p: ranges.Fraction = 1.0

  def __post_init__(self):
    if self.temperature <= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
      raise ValueError(
        f'{self} is not a distribution: temperature must be above 0 (for '
        'greedy evaluations, leave it as it is), top_k 0 or more, top_p in '
        '(0, 1].'
      )


def key(seed: int) -> base.Key:
  """Returns the key of a seed of 64 bits, of which JAX alone reads 32."""
  return jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32)


def shape(logit_BTV, sampling: Sampling, keep_BT=None):
  """Logits of the distribution that is sampled from, dropped tokens at −∞.

  Tokens that are as likely as the least likely one kept are kept, too.

  Args:
    logit_BTV: logits of the model.
    sampling: temperature, top-k and top-p.
    keep_BT: tokens that are never dropped: samples, whose log-probability must
      stay finite after the parameters have changed.
  """
  logit_BTV = logit_BTV / sampling.temperature
  B, T, V = logit_BTV.shape
  k = sampling.top_k if 0 < sampling.top_k < V else V
  if k == V and sampling.top_p >= 1.0:
    return logit_BTV
  # No gradient flows through the choice of tokens. Two dimensions: in loops, a
  # TPU would pad the one token of [B, 1, V] to eight.
  logit_MV = jax.lax.stop_gradient(logit_BTV).reshape(B * T, V)
  least_M1 = jnp.full((B * T, 1), -jnp.inf, logit_BTV.dtype)
  if k < V:
    least_M1 = _kth_largest(logit_MV, k)
  if sampling.top_p < 1.0:
    least_M1 = _least_of_top_p(logit_MV, sampling.top_p, k, least_M1)
  dropped_BTV = logit_BTV < least_M1.reshape(B, T, 1)
  if keep_BT is not None:
    dropped_BTV &= jnp.arange(V)[None, None] != keep_BT[..., None]
  return jnp.where(dropped_BTV, -jnp.inf, logit_BTV)


def _kth_largest(logit_MV, k: int):
  """The k-th largest of each row of logits, [M, 1]."""
  return _largest(lambda x_M1: _sum(logit_MV >= x_M1) >= k, logit_MV[:, :1])


def _least_of_top_p(logit_MV, p: float, k: int, least_M1):
  """The least logit of each row that top-p keeps, [M, 1].

  It is the largest one that has, together with all larger ones, at least the
  probability p.

  Args:
    logit_MV: rows of logits.
    p: the probability.
    k: number of logits that have a probability. Of those that equal the k-th
      largest, only so many are counted.
    least_M1: the k-th largest logit, or −∞.
  """
  max_M1 = logit_MV.max(axis=-1, keepdims=True)
  weight_MV = jnp.exp(logit_MV - max_M1)
  larger_MV = logit_MV > least_M1
  total_M1 = _sum(jnp.where(larger_MV, weight_MV, 0.0))
  total_M1 += (k - _sum(larger_MV)) * jnp.exp(least_M1 - max_M1)

  def reaches_p(x_M1):
    weight_M1 = _sum(jnp.where(logit_MV >= x_M1, weight_MV, 0.0))
    return weight_M1 >= p * total_M1

  return jnp.maximum(_largest(reaches_p, max_M1), least_M1)


def _sum(x_MV):
  return x_MV.sum(axis=-1, keepdims=True)


def _largest(holds, like):
  """The largest number for which a condition holds that holds below it.

  Searches all numbers of a type, two bits of the number a turn: float32 takes
  16 turns, which read the logits once each. Where logits are sharded over the
  vocabulary, only sums are sent between devices.

  Args:
    holds: maps numbers to booleans, elementwise.
    like: array of the shape and type of the result.

  Returns:
    The numbers; −∞ where the condition holds for none.
  """
  bits = jnp.finfo(like.dtype).bits
  unsigned = jnp.dtype(f'uint{bits}')
  sign = unsigned.type(1 << (bits - 1))

  def number(key):
    # The bits of positive numbers are in their order, those of negative ones
    # in the reverse order.
    word = jnp.where(key >= sign, key - sign, ~key)
    return jax.lax.bitcast_convert_type(word, like.dtype)

  def turn(i, key):
    shift = (bits - 2 - 2 * i).astype(unsigned)
    highest = key
    for digit in 1, 2, 3:
      higher = key | (unsigned.type(digit) << shift)
      highest = jnp.where(holds(number(higher)), higher, highest)
    return highest

  key = jax.lax.fori_loop(0, bits // 2, turn, jnp.zeros(like.shape, unsigned))
  # Key 0 is a NaN.
  return jnp.where(key == 0, -jnp.inf, number(key))


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


def next_token(
  logit_B1V, key_B, t_B, sampling: Sampling, greedy: bool
) -> tuple[Int[Array, ' B'], Float[Array, 'B 1 V']]:
  """Draws token t of each row with `fold_in(key, t)`, or takes the likeliest.

  Returns:
    The tokens, and the logits of the distribution that they are from.
  """
  if greedy:
    return jnp.argmax(logit_B1V[:, 0], axis=-1).astype(jnp.int32), logit_B1V
  logit_B1V = shape(logit_B1V, sampling)
  key_t_B = jax.vmap(jax.random.fold_in)(key_B, t_B)
  return draw(key_t_B, logit_B1V[:, 0]).astype(jnp.int32), logit_B1V
