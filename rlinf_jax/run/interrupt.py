"""Ctrl-C and SIGTERM: a run stops after its step, with a checkpoint."""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading

from rlinf_jax.system import exit_watcher

SIGNALS = signal.SIGINT, signal.SIGTERM
SHOW_CURSOR = '\x1b[?25h'  # A progress bar hides it.


class Interrupt:
  """A signal handler that records a request to stop.

  Attributes:
    requested: whether a signal has arrived.
  """

  def __init__(self):
    self.requested = False

  def __call__(self, number, frame):
    """Records the first signal; the second ends the process at once."""
    if self.requested:
      # Python would wait for the thread of the stage that runs.
      _say(SHOW_CURSOR * sys.stderr.isatty() + 'Stopped.')
      exit_watcher.announce()
      os._exit(128 + number)
    self.requested = True
    _say(
      '\nStopping after this step, with a checkpoint. Press Ctrl-C again to '
      'stop at once.'
    )


def _say(line: str):
  """Writes a line, if standard error is open: Ctrl-C also ends `tee`."""
  with contextlib.suppress(OSError):
    os.write(2, f'{line}\n'.encode())


@contextlib.contextmanager
def handle_signals(interrupt: Interrupt) -> Iterator[None]:
  """Handles `SIGNALS`; those that are ignored, as under nohup, stay ignored."""
  previous = {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      if signal.getsignal(number) is not signal.SIG_IGN:
        previous[number] = signal.signal(number, interrupt)
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
