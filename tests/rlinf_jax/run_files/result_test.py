"""When a run counts as finished."""

import math

import pytest

from rlinf_jax.run_files import result


@pytest.mark.parametrize(
  ('score', 'finished'), [(-100.0, True), (-200.0, False), (math.nan, False)]
)
def test_a_score_that_is_missing_does_not_end_a_run(tmp_path, score, finished):
  """Scores may be negative, and those that are no number are not kept."""
  result.Result(tmp_path, 10, 1.0, {'eval/return': score}).write()
  found = result.read_finished(
    tmp_path, 100, stop_at_score=-150.0, score='eval/return', resume=True
  )
  assert (found is not None) == finished
