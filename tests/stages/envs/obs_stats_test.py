"""Observations on a scale of their own, against NumPy on all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import metrics
from stages.envs import obs_stats

LIKE = {'a': jax.ShapeDtypeStruct((3,), jnp.float32)}


def batches(sizes=(1, 7, 30, 2, 60), seed=0):
  """Of different sizes, each about a place of its own."""
  rng = np.random.default_rng(seed)
  return [rng.normal(i, 1.0 + i, (n, 3)) for i, n in enumerate(sizes)]


def scale_of(parts):
  scales = [obs_stats.from_batch({'a': jnp.asarray(x)}, LIKE) for x in parts]
  return functools.reduce(lambda a, b: a.merge(b), scales)


@pytest.mark.parametrize('order', [1, -1])
def test_what_is_merged_is_what_numpy_says_of_all(in_float64, order):
  parts = batches()[::order]
  scale, every = scale_of(parts), np.concatenate(parts)
  assert scale.count == len(every)
  np.testing.assert_allclose(scale.mean['a'], every.mean(0), rtol=1e-12)
  variance = scale.square['a'] / scale.count
  np.testing.assert_allclose(variance, every.var(0), rtol=1e-12)


def test_a_mean_far_from_zero_costs_no_precision():
  rng = np.random.default_rng(0)
  parts = [1e4 + rng.normal(0, 1, (100, 3)) for _ in range(50)]
  parts = [x.astype(np.float32) for x in parts]
  variance = scale_of(parts).square['a'] / 5000
  every = np.concatenate(parts).astype(np.float64)
  # Of numbers of 10⁴, float32 keeps the deviations to 5e-4 each; sums of
  # squares would be 10⁸ times what is looked for.
  np.testing.assert_allclose(variance, every.var(0), rtol=1e-3)


def test_nothing_changes_nothing(in_float64):
  scale = scale_of(batches())
  for merged in (
    scale.merge(obs_stats.init(LIKE)),
    obs_stats.init(LIKE).merge(scale),
  ):
    jax.tree.map(np.testing.assert_array_equal, merged, scale)


def test_observations_come_out_with_mean_zero_and_variance_one(in_float64):
  every = np.concatenate(batches())
  made = obs_stats.normalize(scale_of(batches()), {'a': jnp.asarray(every)})
  want = (every - every.mean(0)) / every.std(0)
  np.testing.assert_allclose(made['a'], want, rtol=1e-6, atol=1e-9)


def test_any_rows_and_steps_are_taken():
  scale = scale_of([x.astype(np.float32) for x in batches()])
  x = {'a': jnp.ones((4, 5, 3))}
  made = obs_stats.normalize(scale, x)['a']
  one = obs_stats.normalize(scale, {'a': jnp.ones(3)})['a']
  np.testing.assert_array_equal(made, np.broadcast_to(one, (4, 5, 3)))
  counted = obs_stats.from_batch(x, LIKE)
  assert counted.count == 20


def test_before_anything_was_seen_all_is_as_it_is():
  x = {'a': jnp.array([[1.0, -2.0, 3.0]])}
  made = obs_stats.normalize(obs_stats.init(LIKE), x)
  np.testing.assert_allclose(made['a'], x['a'], rtol=1e-6)
  assert obs_stats.normalize((), x) is x


def test_what_never_varied_and_then_does_stays_bounded():
  scale = obs_stats.from_batch({'a': jnp.ones((10, 3))}, LIKE)
  made = obs_stats.normalize(scale, {'a': jnp.full((1, 3), 2.0)})
  np.testing.assert_array_equal(made['a'], np.full((1, 3), obs_stats.MOST))


def test_pieces_of_a_batch_are_merged_as_sums_are():
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
