"""A deadline counts work, not waiting."""

import time

from planner.search import deadline as deadline_lib


def test_a_machine_that_is_busy_with_other_work_takes_no_time_away():
  limit = deadline_lib.Deadline(0.05)
  time.sleep(0.1)  # As if others had the processor.
  assert not limit.has_passed and limit.left > 0.04
  before = time.thread_time()
  while not limit.has_passed:
    pass
  assert 0.04 < time.thread_time() - before < 0.06
  assert limit.left == 0
