"""Metrics that can be merged, so that a batch may be cut into pieces.

A metric is a monoid: `merge` joins the metrics of two pieces of a batch, and
the result does not depend on how the batch was cut. `value` computes the number
once, at the end. A plain array counts as a sum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Mean(NamedTuple):
  """A mean as its sum and its count."""

  sum: jax.Array
  count: jax.Array

  def merge(self, other):
    return Mean(self.sum + other.sum, self.count + other.count)

  def value(self):
    return {'': self.sum / np.maximum(self.count, 1e-9)}


class OptionalMean(NamedTuple):
  """A mean that is left out of the log where its count is zero."""

  sum: jax.Array
  count: jax.Array

  def merge(self, other):
    return OptionalMean(self.sum + other.sum, self.count + other.count)

  def value(self):
    return {'': self.sum / self.count} if self.count > 0 else {}


class Score(NamedTuple):
  """A mean of scores between 0 and 1, with its standard error.

  It is left out of the log where its count is zero. The standard error of a
  mean of n independent scores is

    √(Σ (x − μ)² / (n (n − 1)))

  and is left out for n < 2. Scores this small are summed without cancellation.

  Attributes:
    sum: Σ x.
    square: Σ x².
    count: n.
  """

  sum: jax.Array
  square: jax.Array
  count: jax.Array

  def merge(self, other):
    return Score(*(a + b for a, b in zip(self, other, strict=True)))

  def value(self):
    if self.count == 0:
      return {}
    error = self.standard_error()
    values = {'': self.sum / self.count}
    return values if np.isnan(error) else values | {'_stderr': error}

  def standard_error(self) -> float:
    """The standard error of the mean; NaN for fewer than two scores."""
    # In float64: Σ x² and (Σ x)² / n are close where scores are alike.
    total, square, n = (float(x) for x in self)
    if n < 2:
      return np.nan
    variance = max(square - total**2 / n, 0.0) / (n - 1)
    return np.sqrt(variance / n)

  def interval(self, z: float = 1.96) -> tuple[float, float]:
    """A confidence interval of the mean, by Wilson, doi:10.2307/2276774.

    It lies within 0 … 1 and has a width for means of 0 and 1, too. Scores
    between 0 and 1 vary less than successes and failures do; their number is
    raised accordingly, to the n of as many successes and failures with the same
    standard error.

    Args:
      z: quantile of the normal distribution: 1.96 for 95 %.
    """
    p, n = float(self.sum / self.count), float(self.count)
    error = self.standard_error()
    if n >= 2 and error > 0.0:
      n = max(n, p * (1.0 - p) / error**2)
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    root = np.sqrt(p * (1.0 - p) / n + z**2 / (4 * n**2))
    half = z * root / (1 + z**2 / n)
    return max(center - half, 0.0), min(center + half, 1.0)


class Max(NamedTuple):
  """A maximum; it is left out of the log where it is one of no numbers, −∞."""

  max: jax.Array

  def merge(self, other):
    return Max(jnp.maximum(self.max, other.max))

  def value(self):
    return {'': self.max} if self.max > -np.inf or np.isnan(self.max) else {}


class Load(NamedTuple):
  """The largest load of any part, as a multiple of the mean load.

  It is 1 where all have the same. Loads are compared along the last dimension.
  """

  load: jax.Array

  def merge(self, other):
    return Load(self.load + other.load)

  def value(self):
    mean = self.load.mean(-1, keepdims=True)
    return {'': (self.load / np.maximum(mean, 1e-9)).max()}


class Moments(NamedTuple):
  """Mean and biased standard deviation, merged without cancellation.

  Attributes:
    mean: μ, 0 where `count` is.
    square: S = Σ (x − μ)².
    count: n.
  """

  mean: jax.Array
  square: jax.Array
  count: jax.Array

  def merge(self, other):
    """Chan, Golub and LeVeque, 1979: https://doi.org/10.2307/2683386.

    δ = μ_b − μ_a,   μ = μ_a + δ n_b / n,   S = S_a + S_b + δ² n_a n_b / n

    The order of merging changes only rounding.
    """
    count = self.count + other.count
    delta = other.mean - self.mean
    # δ n_b / n from left to right: counts may have fewer bits than the means.
    shift = delta * other.count / jnp.where(count > 0, count, 1)
    return Moments(
      self.mean + shift,
      self.square + other.square + delta * shift * self.count,
      count,
    )

  def value(self):
    variance = self.square / np.maximum(self.count, 1e-9)
    return {'_mean': self.mean, '_std': np.sqrt(variance)}


class ExplainedVariance(NamedTuple):
  """Explained variance of returns R by values v: 1 − Var(R − v) / Var(R).

  It is left out of the log where all R are equal, as far as float32 can tell:
  there is nothing to explain, and rounding would decide.

  Attributes:
    residual: moments of R − v.
    target: moments of R.
  """

  residual: Moments
  target: Moments

  def merge(self, other):
    return ExplainedVariance(
      *(a.merge(b) for a, b in zip(self, other, strict=True))
    )

  def value(self):
    error, spread = (x.value()['_std'] for x in self)
    size = abs(self.target.mean) + abs(self.residual.mean) + error
    if spread <= 1e-6 * size:
      return {}
    return {'': 1.0 - (error / spread) ** 2}


class Histogram(NamedTuple):
  """Counts of the integers from zero; its quantiles are exact.

  It is left out of the log where nothing was counted.
  """

  count: jax.Array

  def merge(self, other):
    return Histogram(self.count + other.count)

  def value(self):
    count = np.asarray(self.count, np.float64)
    seen = np.flatnonzero(count)
    if not seen.size:
      return {}
    below = np.cumsum(count)
    return {
      '_mean': (count * np.arange(count.size)).sum() / below[-1],
      '_p95': np.searchsorted(below, 0.95 * below[-1]),
      '_max': seen[-1],
    }


class FirstRows(NamedTuple):
  """The first rows of a batch, unchanged, for the log."""

  rows: Any

  def merge(self, other):
    del other
    return self


class Rows(NamedTuple):
  """All rows of a batch, unchanged; those of several batches in their order.

  It is made of the results of stages, and is not a result of one.
  """

  rows: Any

  def merge(self, other):
    return Rows(
      jax.tree.map(lambda *x: np.concatenate(x), self.rows, other.rows)
    )


def mean(x, mask=None) -> Mean:
  """Mean of `x` where `mask` is one."""
  mask = jnp.ones_like(x) if mask is None else mask
  return Mean((x * mask).sum(), mask.sum())


def optional_mean(x, mask) -> OptionalMean:
  """Mean of `x` where `mask` is one; left out of the log where it never is."""
  return OptionalMean(*mean(x, mask))


def score(x, mask=None) -> Score:
  """Mean and standard error of scores `x` where `mask` is one."""
  mask = jnp.ones_like(x) if mask is None else mask
  return Score((x * mask).sum(), (x * x * mask).sum(), mask.sum())


def maximum(x, mask=None) -> Max:
  """Maximum of `x` where `mask` is one."""
  return Max(
    x.max() if mask is None else jnp.where(mask > 0, x, -jnp.inf).max()
  )


def moments(x, mask=None) -> Moments:
  """Mean and standard deviation of `x` where `mask` is one."""
  mask = jnp.ones_like(x) if mask is None else mask
  count = mask.sum()
  mean = (x * mask).sum() / jnp.where(count > 0, count, 1)
  return Moments(mean, ((x - mean) ** 2 * mask).sum(), count)


def explained_variance(estimate, truth, mask=None) -> ExplainedVariance:
  """Explained variance of `truth` by `estimate` where `mask` is one."""
  return ExplainedVariance(
    moments(truth - estimate, mask), moments(truth, mask)
  )


def histogram(x, size: int, mask=None) -> Histogram:
  """Counts of 0 … `size` − 1 in `x` where `mask` is one."""
  mask = 1.0 if mask is None else mask.astype(jnp.float32)
  return Histogram(jnp.zeros(size, jnp.float32).at[x.astype(int)].add(mask))


def first_rows(rows, n: int) -> FirstRows:
  """The first `n` rows of a tree of arrays; every piece must have `n`."""
  return FirstRows(jax.tree.map(lambda x: x[:n], rows))


def is_metric(x) -> bool:
  """Whether `x` is one of these metrics, and not an array or a tree."""
  return hasattr(x, 'merge')


def merge(a, b):
  """Merges two trees of metrics; plain arrays are added."""
  return jax.tree.map(
    lambda x, y: x.merge(y) if is_metric(x) else x + y,
    a,
    b,
    is_leaf=is_metric,
  )


def merge_named(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
  """As `merge`, of two `info` by name; what only one of them has is kept."""
  both = {name: merge(a[name], b[name]) for name in a.keys() & b.keys()}
  return a | b | both


def read(info) -> tuple[dict[str, float], dict[str, Any]]:
  """Splits `info`, already on the host, into numbers and logged rows.

  Raises:
    ValueError: if two numbers have the same name, such as a metric `x_mean`
      beside the mean of moments `x`.
  """
  numbers, rows = {}, {}
  for name, metric in info.items():
    if isinstance(metric, FirstRows | Rows):
      rows[name] = metric.rows
    else:
      values = metric.value() if is_metric(metric) else {'': metric}
      for suffix, value in values.items():
        if (full := name + suffix) in numbers:
          raise ValueError(
            f'Two metrics of the workflow are logged as {full!r}: give them '
            'different names.'
          )
        numbers[full] = float(value)
  return numbers, rows
