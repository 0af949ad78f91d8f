"""Notices: lines that tell the user of a failure from which the run recovered.

They are printed, except in a process without a terminal: there they are
buffered, and the process that drives the run fetches and prints them.
"""

import queue

_buffer: queue.SimpleQueue | None = None


def notify(line: str):
  """Prints a line, or buffers it after `start_buffering`."""
  if _buffer is None:
    print(line, flush=True)
  else:
    _buffer.put(line)


def start_buffering():
  """Buffers lines from now on, instead of printing them."""
  global _buffer
  _buffer = queue.SimpleQueue()


def drain() -> list[str]:
  """Removes and returns the buffered lines."""
  return [_buffer.get() for _ in range(_buffer.qsize())]
