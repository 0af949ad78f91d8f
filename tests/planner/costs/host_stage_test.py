import types

import numpy as np
import pytest

from planner.costs import host_stage
from planner.costs import measured as measured_lib


def test_the_last_of_two_coins_by_hand():
  # Three of four pairs have an answer that takes the second.
  assert host_stage.expected((0.0, 1.0), 2, 2) == pytest.approx(0.75)
  assert host_stage.expected((0.0, 1.0), 2, 1) == pytest.approx(0.25)
  assert host_stage.expected((0.0, 1.0), 2, 0) == 0.0


def test_one_row_waits_for_the_mean():
  seconds = tuple(np.random.default_rng(0).exponential(size=50))
  assert host_stage.expected(seconds, 1, 1) == pytest.approx(np.mean(seconds))


@pytest.mark.parametrize('rows, answers', [(16, 16), (64, 40), (5, 4)])
def test_it_is_the_mean_of_many_draws(rows, answers):
  """Within four standard errors."""
  rng = np.random.default_rng(1)
  seconds = rng.exponential(size=333) * (rng.random(333) < 0.5)
  drawn = np.sort(rng.choice(seconds, (4000, rows)), axis=1)[:, answers - 1]
  expected = host_stage.expected(tuple(seconds), rows, answers)
  assert abs(drawn.mean() - expected) < 4 * drawn.std() / 4000**0.5


def test_many_answers_are_summed_up_by_their_quantiles():
  """The last of n exponential answers takes 1 + 1/2 + … + 1/n on average."""
  seconds = tuple(np.random.default_rng(2).exponential(size=200_000))
  harmonic = sum(1 / n for n in range(1, 33))
  assert host_stage.expected(seconds, 32, 32) == pytest.approx(harmonic, 0.01)


def test_only_stages_that_ask_others_wait():
  asks = types.SimpleNamespace(name='environment', awaited=lambda rows: rows)
  works = types.SimpleNamespace(name='reward', awaited=None)
  measured = measured_lib.Measurements(answers=(0.0, 1.0))
  price = lambda stage, measured: host_stage.seconds(
    stage, 2, 0.5, measured, 0.125
  )
  assert price(asks, measured)['waiting for answers'].value == 0.75
  assert price(asks, measured).total.value == 1.25
  assert price(works, measured)['on the host'].value == 0.25
  nothing = measured_lib.Measurements()
  assert price(asks, nothing).total.tag == 'assumed'
