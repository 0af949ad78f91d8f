"""Ctrl-C and SIGTERM: a run stops after its step, with a checkpoint."""

from collections.abc import Iterator
import contextlib
import signal
import threading

SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
  """A signal handler that records a request to stop.

  Attributes:
    requested: whether a signal has arrived.
  """

  def __init__(self):
    self.requested = False

  def __call__(self, number, frame):
    """Records the first signal; the second stops the process at once."""
    if self.requested:
      signal.default_int_handler(number, frame)
    self.requested = True
    print(
      '\nStopping after this step, with a checkpoint. Press Ctrl-C again to '
      'stop at once.',
      flush=True,
    )


@contextlib.contextmanager
def handle_signals() -> Iterator[Interrupt]:
  """Handles `SIGNALS`; those that are ignored, as under nohup, stay ignored."""
  interrupt = Interrupt()
  previous = {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      if signal.getsignal(number) is not signal.SIG_IGN:
        previous[number] = signal.signal(number, interrupt)
  try:
    yield interrupt
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
