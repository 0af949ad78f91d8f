"""Calls with a limit of time, in threads that end with them."""

import asyncio
import sys
import threading
import time

import pytest

from rlinf_jax.agents import deadline


def alive(kept):
  """Threads of pools beside those of `kept`, once they had time to end."""
  for _ in range(6000):
    left = set(deadline_threads()) - kept
    if len(left) <= 2:
      break
    time.sleep(0.01)
  return left


def deadline_threads():
  return [x for x in threading.enumerate() if x.name == 'text_env']


@pytest.fixture
def kept():
  return set(deadline_threads())


def test_a_late_call_that_computes_is_ended_with_its_thread(kept):
  counted = [0] * 4

  def count_for_ever(i):
    while True:
      try:
        counted[i] += 1
      except Exception:  # noqa: BLE001 (As tools do.)
        pass

  pool = deadline.Pool(2, 0.2)
  results = pool.map(count_for_ever, range(4))
  assert all(isinstance(x, deadline.LateError) for x in results)
  assert len(alive(kept)) == 2  # The two wait for calls.
  before = list(counted)
  time.sleep(0.05)
  assert counted == before and min(before) > 0
  pool._seconds = 60.0  # None is late by chance.
  assert pool.map(lambda x: x + 1, range(3)) == [1, 2, 3]


def test_late_calls_that_cannot_be_ended_are_limited(kept, monkeypatch):
  monkeypatch.setattr(deadline, 'MOST_LATE', 3)
  release = threading.Event()
  pool = deadline.Pool(2, 0.05)
  try:
    late = pool.map(lambda _: release.wait(60), range(3))
    assert [type(x) for x in late] == [deadline.LateError] * 3
    with pytest.raises(RuntimeError, match='4 calls .* still run in threads'):
      pool.map(lambda _: release.wait(60), range(1))
  finally:
    release.set()
  assert len(alive(kept)) <= 2
  # Threads that have ended do not count.
  again = threading.Event()
  late = pool.map(lambda _: again.wait(60), range(1))
  again.set()
  assert [type(x) for x in late] == [deadline.LateError]


def test_a_call_that_exits_is_a_failure_and_not_late():
  pool = deadline.Pool(1, 30.0)
  start = time.monotonic()
  failed, fine = pool.map(lambda x: sys.exit() if x else x, [1, 0])
  assert time.monotonic() - start < 10
  assert str(failed) == 'it called sys.exit' and fine == 0


def test_a_call_that_is_cancelled_within_is_a_failure_and_not_late():
  """Asyncio raises what is no Exception."""

  async def cancelled():
    raise asyncio.CancelledError

  pool = deadline.Pool(1, 30.0)
  start = time.monotonic()
  (failed,) = pool.map(lambda _: asyncio.run(cancelled()), [0])
  assert time.monotonic() - start < 10
  assert str(failed) == 'it raised CancelledError()'


def test_calls_that_return_at_their_limit_leave_the_pool_working():
  """An exception in a thread that goes on would lose its lock."""
  pool = deadline.Pool(4, 0.02)
  for i in range(60):
    pool.map(lambda x, i=i: time.sleep(0.0199 + 1e-5 * (x + i % 20)), range(8))
  pool._seconds = 60.0  # None is late by chance.
  assert pool.map(lambda x: x, range(8)) == [*range(8)]
