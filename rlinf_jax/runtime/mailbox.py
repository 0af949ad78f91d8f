"""Received values, in one queue per channel."""

import collections
import queue
import threading
from typing import Any

from rlinf_jax.runtime import base


class Mailbox:
  """A `base.Mailbox` of thread-safe queues.

  A failure is put into every queue as an exception, which `get` raises, so that
  it wakes receivers that already block.
  """

  def __init__(self):
    self._queues = collections.defaultdict(queue.SimpleQueue)
    self._lock = threading.Lock()
    self.failure: BaseException | None = None

  def _queue(self, channel: base.Channel) -> queue.SimpleQueue:
    with self._lock:
      is_new = channel not in self._queues
      values = self._queues[channel]
      if is_new and self.failure:
        values.put(self.failure)
      return values

  def put(self, channel: base.Channel, x: Any):
    self._queue(channel).put(x)

  def has(self, channel: base.Channel) -> bool:
    return not self._queue(channel).empty()

  def get(self, channel: base.Channel, seconds: float | None = None) -> Any:
    values = self._queue(channel)
    try:
      x = values.get(timeout=seconds)
    except queue.Empty:
      raise base.ReceiveTimeoutError(
        f'Place {channel.target!r} waited {seconds:g} s for value '
        f'{channel.value} of place {channel.source!r}'
      ) from None
    if isinstance(x, BaseException):
      values.put(x)  # For the next receiver.
      raise x
    return x

  def fail(self, error: BaseException) -> BaseException:
    with self._lock:
      self.failure = self.failure or error
      for values in self._queues.values():
        values.put(self.failure)
      return self.failure

  def clear(self):
    with self._lock:
      self.failure = None
      self._queues.clear()
