"""What is seen, on a stats of its own: mean zero and variance one so far.

Pictures and letters have a stats already, that of bytes: whatever is of
integers is left as it is, and no moments are kept of it.

Means and variances of pieces merge to those of the whole without error in the
algebra, so they do not depend on how a batch was cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-8
MOST = 10.0  # Deviations from the mean beyond which nothing is told apart.


class RunningStats(NamedTuple):
  """Moments of all that was seen, one of each for every feature.

  Attributes:
    count: how often.
    mean: of it, a tree like an observation of one environment; None in place
      of integers.
    square: Σ (x − mean)², likewise.
  """

  count: Float[Array, '']
  mean: Any
  square: Any

  def merge(self, other: 'RunningStats') -> 'RunningStats':
    """Chan, Golub and LeVeque, 1979: https://doi.org/10.2307/2683386.

    δ = μ_b − μ_a,   μ = μ_a + δ n_b / n,   S = S_a + S_b + δ² n_a n_b / n
    """
    count = self.count + other.count
    share = other.count / jnp.maximum(count, 1.0)
    delta = jax.tree.map(jnp.subtract, other.mean, self.mean)
    mean = jax.tree.map(lambda m, d: m + d * share, self.mean, delta)
    square = jax.tree.map(
      lambda a, b, d: a + b + d**2 * (self.count * share),
      *(self.square, other.square, delta),
    )
    return RunningStats(count, mean, square)


def init(like) -> RunningStats:
  """Before anything was seen; `like` is one observation."""
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, float), _numbers(like))
  return RunningStats(jnp.zeros((), float), zero, zero)


def from_batch(obs, like) -> RunningStats:
  """The moments of observations that have some dimensions ahead of `like`'s."""

  def flat(x, one):
    return x.reshape(-1, *one.shape)

  rows = jax.tree.map(flat, obs, like)
  count = jax.tree.leaves(rows)[0].shape[0]
  rows = _numbers(rows)
  mean = jax.tree.map(lambda x: x.mean(0), rows)
  square = jax.tree.map(lambda x, m: ((x - m[None]) ** 2).sum(0), rows, mean)
  return RunningStats(jnp.full((), count, float), mean, square)


def normalize(stats: RunningStats | tuple[()], obs):
  """Observations by `stats`; as they are before anything was seen.

  So they are where there is no stats, `()`.
  """
  if not stats:
    return obs
  known = stats.count > 0

  def by(x, mean, square):
    if mean is None:
      return x
    variance = jnp.where(known, square / jnp.maximum(stats.count, 1.0), 1.0)
    ahead = (1,) * (x.ndim - mean.ndim)
    mean, variance = (m.reshape(ahead + m.shape) for m in (mean, variance))
    return jnp.clip((x - mean) * jax.lax.rsqrt(variance + EPSILON), -MOST, MOST)

  return jax.tree.map(by, obs, stats.mean, stats.square)


def _numbers(tree):
  """Without what is of integers."""
  real = lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None
  return jax.tree.map(real, tree)
