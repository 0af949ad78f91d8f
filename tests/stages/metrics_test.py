import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from stages import metrics

EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.

# Each metric of integers and a mask.
KINDS = {
  'mean': metrics.mean,
  'mean of all': lambda x, mask: metrics.mean(x),
  'maximum': metrics.maximum,
  'maximum of all': lambda x, mask: metrics.maximum(x),
  'moments': metrics.moments,
  'moments of all': lambda x, mask: metrics.moments(x),
  'score': lambda x, mask: metrics.score(x / 9, mask),
  'score of all': lambda x, mask: metrics.score(x / 9),
  'histogram': lambda x, mask: metrics.histogram(x, 12),
  'plain sum': lambda x, mask: x.sum(),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def batch(seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.integers(0, 10, (16, 3)).astype(float))
  return x, jnp.asarray(rng.integers(0, 2, (16, 3)).astype(float))


def in_pieces(make, pieces, *batch):
  parts = (jnp.split(x, pieces) for x in batch)
  return [make(*part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_pieces_merge_to_the_whole(kind, pieces):
  make = KINDS[kind]
  got = functools.reduce(metrics.merge, in_pieces(make, pieces, *batch()))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, **EXACT), got, make(*batch())
  )


@pytest.mark.parametrize('kind', KINDS)
def test_it_does_not_matter_which_pieces_merge_first(kind):
  a, b, c, d = in_pieces(KINDS[kind], 4, *batch(1))
  merge = metrics.merge
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, **EXACT),
    merge(merge(merge(a, b), c), d),
    merge(merge(a, b), merge(c, d)),
  )


def test_merge_keeps_each_metric_in_its_place():
  info = {
    'a': metrics.mean(jnp.ones(2)),
    'b': (metrics.maximum(jnp.ones(2)), 3),
  }
  assert metrics.merge(info, info) == {
    'a': metrics.Mean(4.0, 4.0),
    'b': (metrics.Max(1.0), 6),
  }


def test_mean_by_hand():
  mean = metrics.mean(jnp.array([[1.0, 2.0], [6.0, 9.0]]), jnp.eye(2))
  assert mean == (10.0, 2.0)
  assert mean.value() == {'': 5.0}
  assert metrics.mean(jnp.array([1.0, 2.0, 6.0])).value() == {'': 3.0}


def test_maximum_by_hand():
  x = jnp.array([-3.0, 7.0, -1.0])
  assert metrics.maximum(x).value() == {'': 7.0}
  assert metrics.maximum(x, jnp.array([1.0, 0.0, 1.0])).value() == {'': -1.0}


def test_moments_by_hand():
  # Mean 5; squares of 9, 1, 1, 1, 0, 0, 4, 16 have the mean 4.
  x = jnp.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
  assert metrics.moments(x).value() == {'_mean': 5.0, '_std': 2.0}


def test_moments_of_equal_numbers_have_no_deviation():
  with jax.enable_x64(False):
    moments = metrics.moments(jnp.full(7, 0.1))
  assert moments.value()['_std'] < 1e-7


@pytest.mark.parametrize('pieces', [1, 4, 256])
def test_moments_of_a_large_mean_do_not_cancel(pieces):
  x = np.random.default_rng(0).normal(1e4, 1.0, 4096).astype(np.float32)
  mask = (np.arange(4096) % 3 > 0).astype(np.float32)
  kept = x[mask > 0].astype(np.float64)
  with jax.enable_x64(False):
    parts = [
      metrics.moments(jnp.asarray(a), jnp.asarray(b))
      for a, b in zip(np.split(x, pieces), np.split(mask, pieces), strict=True)
    ]
    left = functools.reduce(metrics.merge, parts)
    while len(parts) > 1:  # Pairs of pairs, as devices would.
      parts = [*map(metrics.merge, parts[::2], parts[1::2])]
    for moments in (left, parts[0]):
      assert moments.mean.dtype == jnp.float32
      got = moments.value()
      # Float32 has steps of 1e-3 at 1e4.
      np.testing.assert_allclose(got['_mean'], kept.mean(), rtol=1e-6)
      np.testing.assert_allclose(got['_std'], kept.std(), rtol=1e-3)


def test_moments_merge_with_those_of_no_rows():
  some, none = (
    metrics.moments(jnp.arange(4.0), m * jnp.ones(4)) for m in (1, 0)
  )
  assert metrics.merge(some, none) == some == metrics.merge(none, some)
  assert metrics.merge(none, none).value() == {'_mean': 0.0, '_std': 0.0}


def test_histogram_by_hand():
  # 95 ones, 4 threes and a five.
  x = jnp.array([1] * 95 + [3] * 4 + [5])
  read = metrics.histogram(x, 8).value()
  assert read == {'_mean': 1.12, '_p95': 1, '_max': 5}
  assert metrics.histogram(jnp.append(x, 3), 8).value()['_p95'] == 3


@pytest.mark.parametrize('seed', range(4))
def test_histogram_reads_what_sorting_would(seed):
  x = np.random.default_rng(seed).integers(0, 50, 37 + seed)
  read = metrics.histogram(jnp.asarray(x), 50).value()
  np.testing.assert_allclose(read['_mean'], x.mean(), **EXACT)
  # The smallest number that 95 % do not exceed.
  assert read['_p95'] == np.quantile(x, 0.95, method='inverted_cdf')
  assert read['_max'] == x.max()


def test_an_empty_histogram_is_left_out():
  empty = metrics.Histogram(jnp.zeros(4))
  assert empty.value() == {}


def test_first_keeps_the_rows_that_came_first():
  rows = {'token': jnp.arange(12).reshape(6, 2), 'reward': jnp.arange(6)}
  first = metrics.first_rows(rows, 2)
  np.testing.assert_array_equal(first.rows['token'], [[0, 1], [2, 3]])
  np.testing.assert_array_equal(first.rows['reward'], [0, 1])
  later = metrics.first_rows(jax.tree.map(lambda x: x + 50, rows), 2)
  assert metrics.merge(first, later) is first


def test_read_parts_numbers_from_rows():
  numbers, rows = metrics.read(
    jax.device_get(
      {
        'reward': metrics.moments(jnp.array([1.0, 3.0])),
        'length': metrics.histogram(jnp.array([2, 2]), 4),
        'loss': metrics.mean(jnp.array([0.5, 1.5])),
        'ratio_max': metrics.maximum(jnp.array([0.5, 1.5])),
        'sample': metrics.first_rows({'reward': jnp.arange(9)}, 2),
      }
    )
  )
  assert numbers == {
    'reward_mean': 2.0,
    'reward_std': 1.0,
    'length_mean': 2.0,
    'length_p95': 2.0,
    'length_max': 2.0,
    'loss': 1.0,
    'ratio_max': 1.5,
  }
  assert all(type(value) is float for value in numbers.values())
  np.testing.assert_array_equal(rows.pop('sample')['reward'], [0, 1])
  assert not rows


def test_two_metrics_of_one_name_in_the_log_are_refused():
  info = {'x': metrics.moments(jnp.ones(2)), 'x_mean': jnp.ones(())}
  with pytest.raises(ValueError, match="are logged as 'x_mean'"):
    metrics.read(info)


def test_metrics_pass_through_a_compiled_function():
  x, mask = batch(2)
  for make in KINDS.values():
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, **EXACT),
      jax.jit(make)(x, mask),
      make(x, mask),
    )


def test_a_score_has_the_standard_error_of_its_mean():
  x, mask = batch()
  value = metrics.score(x / 9, mask).value()
  kept = np.asarray(x)[np.asarray(mask) > 0] / 9
  np.testing.assert_allclose(value[''], kept.mean(), rtol=1e-12)
  np.testing.assert_allclose(value['_stderr'], stats.sem(kept), rtol=1e-9)
  assert metrics.score(x, 0 * mask).value() == {}
  assert metrics.score(x[:1, :1] / 9).value().keys() == {''}


@pytest.mark.parametrize(('right', 'n'), [(0, 6), (1, 1), (7, 30), (940, 1319)])
def test_the_interval_of_successes_is_that_of_scipy(right, n):
  x = (jnp.arange(n) < right).astype(float)
  want = stats.binomtest(right, n).proportion_ci(method='wilson')
  got = metrics.score(x).interval(z=stats.norm.ppf(0.975))
  # The variance of n scores has n − 1 in its denominator.
  np.testing.assert_allclose(got, want, atol=1e-3 if right else 1e-9)


def test_averaged_samples_narrow_the_interval():
  one = metrics.score(jnp.asarray([0.0, 1.0] * 20))
  averaged = metrics.score(jnp.asarray([0.25, 0.75] * 20))
  width = lambda score: np.diff(score.interval())[0]
  np.testing.assert_allclose(width(averaged), width(one) / 2, rtol=0.1)


def test_rows_of_batches_follow_each_other():
  rows = [{'a': np.arange(2)}, {'a': np.arange(3)}]
  info = functools.reduce(
    metrics.merge, [{'eval/samples': metrics.Rows(x)} for x in rows]
  )
  _, got = metrics.read(info)
  assert got['eval/samples']['a'].tolist() == [0, 1, 0, 1, 2]


def test_a_maximum_of_no_numbers_is_left_out_and_one_that_is_nan_is_not():
  x, none = jnp.arange(3.0), jnp.zeros(3)
  empty = metrics.maximum(x, none)
  assert metrics.read({'max': empty})[0] == {}
  merged = empty.merge(metrics.maximum(x))
  assert metrics.read({'max': merged})[0] == {'max': 2.0}
  bad = metrics.maximum(x.at[1].set(jnp.nan))
  assert np.isnan(metrics.read({'max': bad})[0]['max'])


def test_what_one_of_two_infos_has_is_kept():
  x = jnp.arange(3.0)
  found = metrics.merge_named(
    {'both': metrics.mean(x), 'one': metrics.mean(x + 1.0)},
    {'other': metrics.maximum(x), 'both': metrics.mean(x + 2.0)},
  )
  assert metrics.read(found)[0] == {'both': 2.0, 'one': 2.0, 'other': 2.0}
