import pathlib

import numpy as np
import pytest

from rlinf_jax.report import summary
from rlinf_jax.run_files import run_folder


def make(seconds=372.0, **series):
  """A finished run of metrics given as {step: value}."""
  return run_folder.Run(
    pathlib.Path('r'),
    {
      name.replace('_', '/', 1): run_folder.Series(
        np.array(list(values)), np.array(list(values.values()))
      )
      for name, values in series.items()
    },
    timeline=run_folder.Timeline(),
    result={'seconds': seconds},
    warm_start=None,
  )


def test_a_rise_is_described_in_numbers():
  run = make(
    eval_accuracy={0: 0.312, 180: 0.945},
    time_step={1: 200.0, 2: 160.0},
    time_generate={1: 100.0, 2: 115.76},
  )
  assert summary.describe(run) == (
    'Held-out accuracy rose from 31.2\u202f% to 94.5\u202f% in 180 steps and '
    '6.2 minutes. Most time was spent in generate (58\u202f%).'
  )


def test_fine_tuning_is_described_by_its_held_out_loss():
  run = make(
    eval_loss={0: 11.9, 20: 9.2}, train_loss=dict.fromkeys(range(1, 21), 10.0)
  )
  assert summary.describe(run) == (
    'Held-out loss fell from 11.9 to 9.2 in 20 steps and 6.2 minutes.'
  )


def test_stages_that_overlap_have_their_share_of_the_duration():
  run = make(
    seconds=100.0,
    train_loss={1: 2.0, 2: 1.0},
    time_step={1: 50.0, 2: 50.0},
    time_generate={1: 50.0, 2: 45.0},
    time_gradient={1: 40.0, 2: 50.0},
  )
  assert 'spent in generate (95\u202f%)' in summary.describe(run)


@pytest.mark.parametrize(
  ('after', 'verb'),
  [
    (0.5, 'rose from'),
    (0.303, 'stayed about the same, from'),
    (0.1, 'fell from'),
  ],
)
def test_the_verb_follows_the_numbers(after, verb):
  run = make(eval_accuracy={0: 0.3, 10: after})
  assert summary.describe(run).startswith(
    f'Held-out accuracy {verb} 30.0\u202f% to'
  )


def test_one_evaluation_is_no_change():
  assert summary.describe(make(eval_accuracy={0: 0.3})) == (
    'Held-out accuracy was 30.0\u202f% at step 0, its only measurement.'
  )


def test_noisy_metrics_are_compared_by_their_outer_tenths():
  loss = {step: float(step) for step in range(20)}
  assert summary.first_and_last(make(train_loss=loss), 'train/loss') == (
    0.5,
    18.5,
  )
  assert summary.first_and_last(make(eval_accuracy=loss), 'eval/accuracy') == (
    0.0,
    19.0,
  )


def test_numbers_that_are_not_finite_are_named_and_not_counted():
  run = make(train_loss={1: 2.0, 2: 1.0, 3: np.nan}, seconds=60.0)
  assert summary.describe(run) == (
    'Loss fell from 2 to 1 in 3 steps and 60 seconds. From step 3 on, '
    'some values were NaN or infinite: train/loss.'
  )


def test_an_unfinished_run_is_not_called_finished():
  run = make(train_loss={1: 2.0, 2: 1.0})._replace(result=None)
  assert 'stopped after step 2' in summary.describe(run)
