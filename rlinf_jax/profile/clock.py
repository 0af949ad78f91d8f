"""How long calls take, on one device or on all of them at once."""

from collections.abc import Callable, Sequence
from concurrent import futures
import itertools
import statistics
import time

import jax

LEAST, MOST = 3, 20  # Calls.
ENOUGH = 0.2  # Seconds, after which no more than the fewest calls are made.


def seconds(
  calls: Sequence[Callable[[], object]],
  clock: Callable[[], float] = time.perf_counter,
) -> float:
  """The median seconds of a call, all of `calls` being made at the same time.

  Each is made once before it counts.

  Args:
    calls: one a device.
    clock: what tells seconds; `time.process_time` makes them CPU-seconds.
  """
  if len(calls) == 1:
    return statistics.median(_series(calls[0], clock))
  with futures.ThreadPoolExecutor(len(calls)) as pool:
    list(pool.map(lambda call: jax.block_until_ready(call()), calls))
    spent = list(pool.map(_series, calls, itertools.repeat(clock)))
  return statistics.median(x for some in spent for x in some)


def _series(call, clock) -> list[float]:
  jax.block_until_ready(call())
  spent, began = [], clock()
  while len(spent) < LEAST or (len(spent) < MOST and clock() - began < ENOUGH):
    start = clock()
    jax.block_until_ready(call())
    spent.append(clock() - start)
  return spent
