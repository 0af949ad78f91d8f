"""Skipped updates are reported, and end a run that makes no others."""

import pytest

from rlinf_jax.run import skipped
from rlinf_jax.run_files import failures


def updates(*shares, limit=3):
  count = skipped.SkippedUpdates(limit, 'runs/x')
  return [
    count.update(step + 1, {'train/skipped': share, 'time/skipped': 1.0})
    for step, share in enumerate(shares)
  ]


def test_a_skipped_update_is_a_line():
  none, some, after = updates(0.0, 0.25, 0.0)
  assert (none, after) == (None, None)
  assert some == (
    'Step 2: 25% of the updates were skipped, as their gradient was not finite.'
  )


def test_a_step_with_one_good_update_starts_the_count_again():
  assert len(updates(1.0, 1.0, 0.5, 1.0, 1.0, 0.0, 1.0)) == 7


def test_steps_without_good_updates_end_the_run():
  with pytest.raises(skipped.NotFiniteError, match='from step 2 to step 4'):
    updates(0.0, 1.0, 1.0, 1.0)


def test_the_updates_of_a_critic_count_too():
  values = {'train/skipped': 0.0, 'train/critic_skipped': 0.5}
  assert failures.skipped_share(values) == 0.5
