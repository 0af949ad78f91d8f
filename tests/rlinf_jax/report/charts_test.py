import numpy as np

from rlinf_jax.report import charts

RNG = np.random.default_rng(0)


def test_what_is_not_noisy_is_not_smoothed():
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
  apart = np.abs(charts.smooth(spiked) - charts.smooth(value))
  assert apart.max() < 0.2


def test_numbers_that_are_not_finite_stay_holes():
  value = RNG.random(100)
  value[[10, 20]] = np.nan, np.inf
  smoothed = charts.smooth(value)
  assert np.flatnonzero(np.isnan(smoothed)).tolist() == [10, 20]


def test_long_curves_are_thinned_to_means():
  value = np.arange(1000.0)
  thin = charts.thin(value)
  assert len(thin) <= charts.MOST_POINTS
  np.testing.assert_array_equal(thin[:3], [1.0, 4.0, 7.0])
  np.testing.assert_array_equal(charts.thin(value[:400]), value[:400])


def test_a_picture_does_not_depend_on_those_before_it():
  line = charts.Line(np.arange(5), np.arange(5.0))
  first = charts.curves([line], width=300, height=150)
  assert charts.curves([line], width=300, height=150) == first
