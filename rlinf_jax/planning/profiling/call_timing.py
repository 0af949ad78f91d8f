"""Measures the seconds of calls, on one device or on several at once."""

from collections.abc import Callable, Sequence
from concurrent import futures
import statistics
import time

import jax

Calls = Sequence[Callable[[], object]]
LEAST, MOST = 3, 20  # Repetitions.
ENOUGH = 0.2  # Seconds a case, after which `LEAST` repetitions suffice.


def seconds(
  cases: Sequence[Calls], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
  """Returns the median seconds of each of several cases.

  The cases alternate, so that a period of noise affects all of them. Each is
  called once before measuring.

  Args:
    cases: for each case, calls that are made at the same time, one a device.
    clock: returns seconds; `time.process_time` for CPU seconds.
  """
  spent = [[] for _ in cases]
  with futures.ThreadPoolExecutor(max(map(len, cases))) as pool:
    for calls in cases:
      _once(pool, calls, clock)
    start = clock()
    while len(spent[0]) < LEAST or (
      len(spent[0]) < MOST and clock() - start < ENOUGH * len(cases)
    ):
      for calls, times in zip(cases, spent, strict=True):
        times.append(_once(pool, calls, clock))
  return [statistics.median(times) for times in spent]


def _once(pool, calls: Calls, clock) -> float:
  """Returns the mean seconds of calls that are made at the same time."""

  def timed(call):
    start = clock()
    jax.block_until_ready(call())
    return clock() - start

  # For a single call, a thread would only add overhead.
  over = map if len(calls) == 1 else pool.map
  return statistics.fmean(over(timed, calls))
