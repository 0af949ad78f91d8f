"""How long calls take, on one device or on all of them at once."""

from collections.abc import Callable, Sequence
from concurrent import futures
import statistics
import time

import jax

Calls = Sequence[Callable[[], object]]
LEAST, MOST = 3, 20  # Rounds.
ENOUGH = 0.2  # Seconds a case, after which no more than the fewest are made.


def seconds(
  cases: Sequence[Calls], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
  """The median seconds of a call, of each of several cases.

  Cases take turns, so that a spell of noise falls on all of them. Each is
  called once before it counts.

  Args:
    cases: calls that are made at the same time, one a device.
    clock: what tells seconds; `time.process_time` makes them CPU-seconds.
  """
  spent = [[] for _ in cases]
  with futures.ThreadPoolExecutor(max(map(len, cases))) as pool:
    for calls in cases:
      _once(pool, calls, clock)
    began = clock()
    while len(spent[0]) < LEAST or (
      len(spent[0]) < MOST and clock() - began < ENOUGH * len(cases)
    ):
      for calls, times in zip(cases, spent, strict=True):
        times.append(_once(pool, calls, clock))
  return [statistics.median(times) for times in spent]


def _once(pool, calls: Calls, clock) -> float:
  """Seconds of calls made at the same time, in the mean."""

  def timed(call):
    start = clock()
    jax.block_until_ready(call())
    return clock() - start

  # Another thread would only add its own beginning.
  over = map if len(calls) == 1 else pool.map
  return statistics.fmean(over(timed, calls))
