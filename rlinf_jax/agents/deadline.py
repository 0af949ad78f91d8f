"""A bounded pool of threads in which each call has a time limit."""

from collections.abc import Callable, Sequence
import queue
import threading
import time
from typing import Any


class LateError(Exception):
  """A call took longer than its limit."""


class Pool:
  """Threads that call functions, one call each at a time.

  A thread cannot be ended from outside. One whose call is late is abandoned,
  and another takes its place; it ends when its call does, or with the process.
  """

  def __init__(self, num_threads: int, seconds: float):
    """Starts no thread yet.

    Args:
      num_threads: calls at once.
      seconds: that one call may take, from when it starts.
    """
    self._num_threads, self._seconds = num_threads, seconds
    self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    self._lock, self._started = threading.Lock(), False

  def map(self, function: Callable, items: Sequence[Any]) -> list[Any]:
    """Calls the function with each item.

    Returns:
      Results in the order of the items; where a call raised or was late, its
      exception.
    """
    with self._lock:
      if not self._started:
        for _ in range(self._num_threads):
          self._start()
        self._started = True
    calls = [_Call(function, item) for item in items]
    for call in calls:
      self._calls.put(call)
    return [self._wait(call) for call in calls]

  def _start(self):
    threading.Thread(target=self._serve, name='text_env', daemon=True).start()

  def _serve(self):
    while True:
      call = self._calls.get()
      call.run()
      if call.is_abandoned():
        return

  def _wait(self, call: '_Call') -> Any:
    """The result of a call, or its exception."""
    while not call.done.wait(call.left(self._seconds)):
      if call.left(self._seconds) <= 0 and call.abandon():
        self._start()
        return LateError(f'it took more than {self._seconds:g} s')
    return call.result


class _Call:
  """A call of a function, which one thread runs and another waits for."""

  def __init__(self, function: Callable, item: Any):
    self._function, self._item = function, item
    self._start, self._lock, self._abandoned = None, threading.Lock(), False
    self.done, self.result = threading.Event(), None

  def run(self):
    self._start = time.monotonic()
    try:
      result = self._function(self._item)
    except Exception as error:  # noqa: BLE001 (Foreign code: any error counts.)
      result = error
    with self._lock:
      self.result = result
      self.done.set()

  def left(self, seconds: float) -> float:
    """Seconds until it is late; all of them before it has started."""
    if self._start is None:
      return seconds
    return max(0.0, self._start + seconds - time.monotonic())

  def abandon(self) -> bool:
    """Gives up on it, unless it is done."""
    with self._lock:
      self._abandoned = not self.done.is_set()
      return self._abandoned

  def is_abandoned(self) -> bool:
    with self._lock:
      return self._abandoned
