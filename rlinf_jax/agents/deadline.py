"""A bounded pool of threads in which each call has a time limit."""

from collections.abc import Callable, Sequence
import queue
import threading
import time
from typing import Any

from rlinf_jax.system import threads

MOST_LATE = 256  # Threads of late calls that could not be ended yet.


class LateError(Exception):
  """A call took longer than its limit."""


class Pool:
  """Threads that call functions, one call each at a time.

  A thread whose call is late is ended by an exception, and another takes its
  place. What waits outside Python, such as for a network without a limit of
  time, ends only when that does, or with the process. Of such threads there are
  a limited number.
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
    self._late: list[threading.Thread] = []

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

    Raises:
      RuntimeError: if more than `MOST_LATE` late calls have not ended.
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
      self._abandon(call)
      self._start()
    return max(left, 0.0)

  def _abandon(self, call: 'Call'):
    """Ends the thread of a late call as soon as it can be."""
    # It reads `is_over`, which is set, after it has set `has_returned`: so no
    # exception is raised in a thread that goes on to take the lock.
    if not call.has_returned:
      threads.end(call.thread)
    self._late = [x for x in self._late if x.is_alive()] + [call.thread]
    if len(self._late) > MOST_LATE:
      raise RuntimeError(
        f'{len(self._late)} calls of environments or agents took more than '
        f'{self._seconds:g} s each, and still run in threads that wait outside '
        'Python: give what they wait for a limit of time of its own, such as '
        'the timeout of a connection, or let them run in a process that ends.'
      )

  def _start(self):
    threading.Thread(target=self._serve, name='text_env', daemon=True).start()

  def _serve(self):
    try:
      while True:
        call = self._calls.get()
        result = call.run()
        if call.is_over:  # Another thread has taken the place of this one.
          return
        with self._lock:
          if call.is_over:
            return
          call.end(result)
          self._lock.notify_all()
    except SystemExit:  # By `threads.end`.
      return


class Call:
  """A call of a function.

  Attributes:
    start: when it started, by `time.monotonic`; None before.
    thread: that makes it; None before.
    has_returned: whether the function has.
    is_over: whether it has a result.
    seconds: that it took, once it is over.
    result: what the function returned, or the exception that it raised.
  """

  def __init__(self, function: Callable, item: Any):
    self._function, self._item = function, item
    self.start, self.thread, self.has_returned = None, None, False
    self.is_over, self.result = False, None
    self.seconds = 0.0

  def run(self) -> Any:
    """The result of the function, or its exception."""
    self.thread = threading.current_thread()
    self.start = time.monotonic()
    try:
      result = self._function(self._item)
    except Exception as error:  # noqa: BLE001 (Foreign code: any error counts.)
      result = error
    except SystemExit:
      if self.is_over:  # By `threads.end`.
        raise
      result = RuntimeError('it called sys.exit')
    except BaseException as error:  # noqa: BLE001 (As asyncio.CancelledError.)
      result = RuntimeError(f'it raised {error!r}')
    self.has_returned = True
    return result

  def end(self, result: Any):
    self.seconds = time.monotonic() - self.start
    self.is_over, self.result = True, result
