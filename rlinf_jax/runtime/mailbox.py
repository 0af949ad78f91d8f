"""Values on their way between places, in the order in which they were sent."""

import collections
import queue
import threading
from typing import Any

from rlinf_jax.runtime import base
from rlinf_jax.runtime.base import Channel


class Mailbox:
  """A queue a way. Whoever waits when something fails is told."""

  def __init__(self):
    self._boxes = collections.defaultdict(queue.SimpleQueue)
    self._lock = threading.Lock()
    self.failure: BaseException | None = None

  def _box(self, way: Channel) -> queue.SimpleQueue:
    with self._lock:
      fresh = way not in self._boxes
      box = self._boxes[way]
      if fresh and self.failure:
        box.put(self.failure)
      return box

  def put(self, way: Channel, x: Any):
    """Leaves a value."""
    self._box(way).put(x)

  def has(self, way: Channel) -> bool:
    """Whether `get` would not wait."""
    return not self._box(way).empty()

  def get(self, way: Channel, seconds: float | None = None) -> Any:
    """The next value, when it is there.

    Args:
      way: that it comes.
      seconds: to wait at most.

    Raises:
      BaseException: what has failed.
      base.ReceiveTimeoutError: if nothing has come.
    """
    try:
      x = self._box(way).get(timeout=seconds)
    except queue.Empty:
      raise base.ReceiveTimeoutError(
        f'Place {way.target!r} has waited {seconds:g} s for value {way.value} '
        f'of place {way.source!r}'
      ) from None
    if isinstance(x, BaseException):
      raise x
    return x

  def fail(self, error: BaseException) -> BaseException:
    """Tells the first failure to all who wait; returns it."""
    with self._lock:
      self.failure = self.failure or error
      for box in self._boxes.values():
        box.put(self.failure)
      return self.failure

  def clear(self):
    """Begins anew: what was left is nobody's."""
    with self._lock:
      self.failure = None
      self._boxes.clear()
