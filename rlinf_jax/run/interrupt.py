"""Ctrl-C and SIGTERM: a run ends after its step, with a checkpoint."""

from collections.abc import Iterator
import contextlib
import signal
import threading

SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
  """Whether somebody has asked the run to end.

  Attributes:
    asked: they have.
  """

  def __init__(self):
    self.asked = False

  def __call__(self, number, frame):
    """Takes note of a signal; the second does not wait."""
    if self.asked:
      signal.default_int_handler(number, frame)
    self.asked = True
    print(
      '\nStopping after this step, with a checkpoint; again to stop at once.',
      flush=True,
    )


@contextlib.contextmanager
def listening() -> Iterator[Interrupt]:
  """Listens to signals; those that are ignored, as under nohup, stay so."""
  interrupt = Interrupt()
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      if signal.getsignal(number) is not signal.SIG_IGN:
        before[number] = signal.signal(number, interrupt)
  try:
    yield interrupt
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
