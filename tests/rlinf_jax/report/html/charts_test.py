import numpy as np

from rlinf_jax.report.html import charts

RNG = np.random.default_rng(0)


def test_smooth_curves_are_unchanged():
  value = np.linspace(0.0, 1.0, 100)
  np.testing.assert_array_equal(charts.smooth(value), value)
  np.testing.assert_array_equal(charts.smooth(np.ones(100)), np.ones(100))


def test_smoothing_takes_most_of_the_noise_and_keeps_the_level():
  value = 3 + RNG.standard_normal(600)
  smoothed = charts.smooth(value)
  assert abs(smoothed.mean() - value.mean()) < 0.05
  assert smoothed.std() < 0.3 * value.std()


def test_a_spike_hardly_moves_its_neighbors():
  value = RNG.random(120)
  spiked = value.copy()
  spiked[50] = 1000.0
  difference = np.abs(charts.smooth(spiked) - charts.smooth(value))
  assert difference.max() < 0.2


def test_values_that_are_not_finite_become_nan():
  value = RNG.random(100)
  value[[10, 20]] = np.nan, np.inf
  smoothed = charts.smooth(value)
  assert np.flatnonzero(np.isnan(smoothed)).tolist() == [10, 20]


def test_long_curves_are_downsampled_to_means():
  value = np.arange(1000.0)
  short = charts.downsample(value)
  assert len(short) <= charts.MAX_POINTS
  np.testing.assert_array_equal(short[:3], [1.0, 4.0, 7.0])
  np.testing.assert_array_equal(charts.downsample(value[:400]), value[:400])


def test_names_may_have_dollars():
  record = {'place': 'a', 'stage': '$x^$', 'step': 1, 'start': 0.0, 'end': 1.0}
  assert '$x^$' in charts.gantt([record], {'$x^$': 1}, width=300)


def test_a_picture_does_not_depend_on_those_before_it():
  curve = charts.Curve(np.arange(5), np.arange(5.0))
  first = charts.curves([curve], width=300, height=150)
  assert charts.curves([curve], width=300, height=150) == first
