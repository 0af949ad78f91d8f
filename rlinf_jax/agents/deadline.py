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
    self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    # Notified whenever a call is done.
    self._lock, self._started = threading.Condition(), False

  def map(self, function: Callable, items: Sequence[Any]) -> list[Any]:
    """Calls the function with each item.

    Returns:
      Results in the order of the items; where a call raised or was late, its
      exception.
    """
    calls = [self.submit(function, item) for item in items]
    self.wait(calls, len(calls))
    return [call.result for call in calls]

  def submit(self, function: Callable, item: Any) -> 'Call':
    """A call that a thread makes when one is free; `wait` for its result."""
    with self._lock:
      if not self._started:
        for _ in range(self._num_threads):
          self._start()
        self._started = True
    call = Call(function, item)
    self._calls.put(call)
    return call

  def wait(self, calls: Sequence['Call'], count: int):
    """Waits until at least `count` of the calls are over.

    Calls that are late are then over, and their result is a `LateError`.
    """
    with self._lock:
      while True:
        left = [self._seconds_left(call) for call in calls if not call.is_over]
        if sum(call.is_over for call in calls) >= count:
          return
        self._lock.wait(min(left))

  def _seconds_left(self, call: 'Call') -> float:
    """Seconds until a call is late; one that is late is given up."""
    left = self._seconds
    if call.start is not None:
      left = call.start + self._seconds - time.monotonic()
    if left <= 0:
      call.end(LateError(f'it took more than {self._seconds:g} s'))
      self._start()
    return max(left, 0.0)

  def _start(self):
    threading.Thread(target=self._serve, name='text_env', daemon=True).start()

  def _serve(self):
    while True:
      call = self._calls.get()
      result = call.run()
      with self._lock:
        if call.is_over:  # Another thread has taken the place of this one.
          return
        call.end(result)
        self._lock.notify_all()


class Call:
  """A call of a function.

  Attributes:
    start: when it started, by `time.monotonic`; None before.
    is_over: whether it has a result.
    seconds: that it took, once it is over.
    result: what the function returned, or the exception that it raised.
  """

  def __init__(self, function: Callable, item: Any):
    self._function, self._item = function, item
    self.start, self.is_over, self.result = None, False, None
    self.seconds = 0.0

  def run(self) -> Any:
    """The result of the function, or its exception."""
    self.start = time.monotonic()
    try:
      return self._function(self._item)
    except Exception as error:  # noqa: BLE001 (Foreign code: any error counts.)
      return error

  def end(self, result: Any):
    self.seconds = time.monotonic() - self.start
    self.is_over, self.result = True, result
