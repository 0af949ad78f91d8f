"""The number of points of a sweep that this machine runs at a time.

The limit follows the cores and the memory that are there. Memory is measured:
another point starts when those that run have logged a metric, so that the
largest of them is known, and when as much memory is free.
"""

from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib
import time

import psutil

from rlinf_jax.sweep import process
from rlinf_jax.system import memory

CORES = 2  # Of a point: JAX computes on several, Python on one.
SPARE = 1.25  # A point may need this many times the memory of another.
INTERVAL = 1.0  # Seconds between measurements.
ACCELERATORS = 'nvidia[0-9]*', 'accel[0-9]*', 'accel/accel*'  # Below /dev.


class Capacity:
  """Decides whether another point may start, by cores and memory.

  Attributes:
    most: points at a time, by the cores. It is one where accelerators are,
      since JAX reserves the memory of all of them for one process.
    peak: bytes of the largest point that was measured.
  """

  def __init__(
    self,
    most: int | None = None,
    available: Callable[[], float] | None = None,
    used: Callable[[process.RunningPoint], float] | None = None,
  ):
    """Measures nothing yet.

    Args:
      most: points at a time; by default as many as the cores allow.
      available: measures the free memory of this machine in bytes.
      used: measures the memory of a point in bytes.
    """
    self.most = most_by_cores() if most is None else most
    self.peak = 0.0
    self._available = available or memory.available
    self._used = used or used_memory
    self._measured_at = -INTERVAL

  def may_start(self, running: Sequence[process.RunningPoint]) -> bool:
    """Whether another point may start beside those that run."""
    if not running:
      return True
    if self.most == 1 or time.monotonic() < self._measured_at + INTERVAL:
      return False
    self._measured_at = time.monotonic()
    used = [self._used(job) for job in running]
    self.peak = max(self.peak, *used)
    if len(running) >= self.most or not all(map(process.has_stepped, running)):
      return False
    growth = sum(self.peak - x for x in used)
    return self._available() - growth >= SPARE * self.peak


def most_by_cores() -> int:
  """The number of points that the cores and accelerators allow."""
  on_cpu = os.environ.get('JAX_PLATFORMS') == 'cpu'
  folder = pathlib.Path('/dev')
  if not on_cpu and any(list(folder.glob(form)) for form in ACCELERATORS):
    return 1
  return max(1, len(os.sched_getaffinity(0)) // CORES)


def used_memory(job: process.RunningPoint) -> float:
  """Bytes of memory of a point's process and of its children."""
  total = 0
  with contextlib.suppress(psutil.Error):  # It has just ended.
    parent = psutil.Process(job.process.pid)
    for one in [parent, *parent.children(recursive=True)]:
      with contextlib.suppress(psutil.Error):
        total += one.memory_info().rss
  return total
