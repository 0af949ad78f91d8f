"""Running mean and variance of observations, and normalization by them.

Integer leaves, such as images and text, are bytes of a known range: they are
left as they are, and no statistics are kept of them.

Statistics of the pieces of a batch merge exactly (in real arithmetic) to those
of the batch, so they do not depend on how it was cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-8
CLIP = 10.0  # Normalized observations are clipped to ±CLIP.


class RunningStats(NamedTuple):
  """Mean and variance of every feature seen so far.

  Attributes:
    count: number of observations.
    mean: a tree like one observation; None in place of integer leaves.
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
      self.square,
      other.square,
      delta,
    )
    return RunningStats(count, mean, square)


def init(obs_spec) -> RunningStats:
  """Statistics of no observation; `obs_spec` has the shapes of one."""
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, float), _floats(obs_spec))
  return RunningStats(jnp.zeros((), float), zero, zero)


def from_batch(obs, obs_spec) -> RunningStats:
  """Statistics of a batch of observations.

  Args:
    obs: a tree of […, *shape], with any leading dimensions.
    obs_spec: shapes of one observation.
  """

  def flat(x, spec):
    return x.reshape(-1, *spec.shape)

  rows = jax.tree.map(flat, obs, obs_spec)
  count = jax.tree.leaves(rows)[0].shape[0]
  rows = _floats(rows)
  mean = jax.tree.map(lambda x: x.mean(0), rows)
  square = jax.tree.map(lambda x, m: ((x - m[None]) ** 2).sum(0), rows, mean)
  return RunningStats(jnp.full((), count, float), mean, square)


def normalize(stats: RunningStats | tuple[()], obs):
  """Observations with mean zero and variance one, clipped to ±CLIP.

  Args:
    stats: () for a policy that does not normalize; then, and while their count
      is zero, observations keep their scale.
    obs: a tree of […, *shape].
  """
  if not stats:
    return obs
  known = stats.count > 0

  def leaf(x, mean, square):
    if mean is None:
      return x
    variance = jnp.where(known, square / jnp.maximum(stats.count, 1.0), 1.0)
    leading = (1,) * (x.ndim - mean.ndim)
    mean, variance = (m.reshape(leading + m.shape) for m in (mean, variance))
    return jnp.clip((x - mean) * jax.lax.rsqrt(variance + EPSILON), -CLIP, CLIP)

  return jax.tree.map(leaf, obs, stats.mean, stats.square)


def _floats(tree):
  """The tree with None in place of integer leaves."""
  keep = lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None
  return jax.tree.map(keep, tree)
