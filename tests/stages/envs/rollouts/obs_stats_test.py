"""Running statistics of observations against NumPy on all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import metrics
from stages.envs.rollouts import obs_stats

LIKE = {'a': jax.ShapeDtypeStruct((3,), jnp.float32)}


def batches(sizes=(1, 7, 30, 2, 60), seed=0):
  """Batches of different sizes and means."""
  rng = np.random.default_rng(seed)
  return [rng.normal(i, 1.0 + i, (n, 3)) for i, n in enumerate(sizes)]


def stats_of(parts):
  pieces = [obs_stats.from_batch({'a': jnp.asarray(x)}, LIKE) for x in parts]
  return functools.reduce(lambda a, b: a.merge(b), pieces)


@pytest.mark.parametrize('order', [1, -1])
def test_merged_statistics_are_those_of_all_observations(in_float64, order):
  parts = batches()[::order]
  stats, every = stats_of(parts), np.concatenate(parts)
  assert stats.count == len(every)
  np.testing.assert_allclose(stats.mean['a'], every.mean(0), rtol=1e-12)
  variance = stats.square['a'] / stats.count
  np.testing.assert_allclose(variance, every.var(0), rtol=1e-12)


def test_a_mean_far_from_zero_costs_no_precision():
  rng = np.random.default_rng(0)
  parts = [1e4 + rng.normal(0, 1, (100, 3)) for _ in range(50)]
  parts = [x.astype(np.float32) for x in parts]
  variance = stats_of(parts).square['a'] / 5000
  every = np.concatenate(parts).astype(np.float64)
  # At 10⁴, float32 keeps deviations to 5e-4 each; sums of squares would be
  # 10⁸ times the variance.
  np.testing.assert_allclose(variance, every.var(0), rtol=1e-3)


def test_merging_with_empty_statistics_changes_nothing(in_float64):
  stats = stats_of(batches())
  for merged in (
    stats.merge(obs_stats.init(LIKE)),
    obs_stats.init(LIKE).merge(stats),
  ):
    jax.tree.map(np.testing.assert_array_equal, merged, stats)


def test_observations_come_out_with_mean_zero_and_variance_one(in_float64):
  every = np.concatenate(batches())
  got = obs_stats.normalize(stats_of(batches()), {'a': jnp.asarray(every)})
  want = (every - every.mean(0)) / every.std(0)
  np.testing.assert_allclose(got['a'], want, rtol=1e-6, atol=1e-9)


def test_any_leading_dimensions_are_accepted():
  stats = stats_of([x.astype(np.float32) for x in batches()])
  x = {'a': jnp.ones((4, 5, 3))}
  got = obs_stats.normalize(stats, x)['a']
  one = obs_stats.normalize(stats, {'a': jnp.ones(3)})['a']
  np.testing.assert_array_equal(got, np.broadcast_to(one, (4, 5, 3)))
  counted = obs_stats.from_batch(x, LIKE)
  assert counted.count == 20


def test_empty_statistics_leave_observations_unchanged():
  x = {'a': jnp.array([[1.0, -2.0, 3.0]])}
  got = obs_stats.normalize(obs_stats.init(LIKE), x)
  np.testing.assert_allclose(got['a'], x['a'], rtol=1e-6)
  assert obs_stats.normalize((), x) is x


def test_a_feature_without_variance_stays_bounded():
  stats = obs_stats.from_batch({'a': jnp.ones((10, 3))}, LIKE)
  got = obs_stats.normalize(stats, {'a': jnp.full((1, 3), 2.0)})
  np.testing.assert_array_equal(got['a'], np.full((1, 3), obs_stats.CLIP))


def test_pieces_of_a_batch_merge_to_the_batch():
  one, two = ({'a': jnp.asarray(x, jnp.float32)} for x in batches()[1:3])
  merged = metrics.merge(
    obs_stats.from_batch(one, LIKE), obs_stats.from_batch(two, LIKE)
  )
  both = jax.tree.map(lambda *xs: jnp.concatenate(xs), one, two)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
    merged,
    obs_stats.from_batch(both, LIKE),
  )
