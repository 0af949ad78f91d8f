"""Interrupts that reach a program (`python -m rlinf_jax.NAME`) at any moment.

And, for a run (`rlinf_jax.main`), ends that it cannot tell itself. Until the
modules are imported, Python searches for no garbage, for a fifth of the time.

Python answers Ctrl-C with an exception where the main thread stands. That can
be in code which swallows it, such as a callback of a weak reference or of
garbage collection, and the program goes on. Until the modules are imported, a
handler therefore ends the process itself: there is nothing yet to clean up.
Later, an interrupt that such a callback has swallowed is sent again.
"""

from collections.abc import Iterator
import contextlib
import gc
import os
import signal
import sys
import threading
from types import FrameType

from rlinf_jax.system import exit_watcher

EXIT_CODE = 128 + signal.SIGINT  # As a shell reports it.
STOPPED = b'Stopped while the program was starting.\n'
# Once a checkpoint has failed, which is reported, threads of tensorstore still
# call into the event loop that orbax has closed.
CLOSED = 'Event loop is closed'
AGAIN = 0.01  # Seconds after which a swallowed interrupt is sent again.


def begin():
  """Lets an interrupt end the process, if a program of this package starts.

  It does if Python still looks for the module that `-m` names: it imports the
  packages around it first, and `sys.argv[0]` is '-m' for that time
  (https://docs.python.org/3/library/sys.html#sys.argv). An interrupt that is
  ignored, or handled by others, is left as it is. The end of a run (`main`) is
  watched from here on, as imports, too, can be refused memory.
  """
  names = [text.removeprefix('-m') for text in sys.orig_argv]
  is_ours = any(name.startswith(f'{__package__}.') for name in names)
  if not is_ours or sys.argv[:1] != ['-m']:
    return
  gc.disable()
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
  for stream in (sys.stdout, sys.stderr):
    # In a locale without them, signs such as → are written by their numbers.
    if stream is not None:
      stream.reconfigure(errors='backslashreplace')
  # That there is no torch, which only vLLM and simulators need.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  if f'{__package__}.main' in names:
    exit_watcher.start()


@contextlib.contextmanager
def ended() -> Iterator[None]:
  """Raises `KeyboardInterrupt` for interrupts again, and exits 130 on it.

  Garbage is collected again, too, but what was imported is not searched: it
  stays.
  """
  gc.freeze()
  gc.enable()
  try:
    if signal.getsignal(signal.SIGINT) is _stop:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _answer
    yield
  except KeyboardInterrupt:
    print('Stopped.', file=sys.stderr)
    sys.exit(EXIT_CODE)


def _answer(unraisable):
  """Answers an error that a callback could not raise.

  An interrupt is sent again.
  """
  if unraisable.exc_type is KeyboardInterrupt:
    # Sent at once, it would be raised in this function, and be lost, too.
    main = threading.main_thread().ident
    send = threading.Timer(AGAIN, signal.pthread_kill, (main, signal.SIGINT))
    send.daemon = True
    send.start()
  elif str(unraisable.exc_value) != CLOSED:
    sys.__unraisablehook__(unraisable)


def _stop(number: int, frame: FrameType | None):
  """Ends the process at once, with a sentence."""
  with contextlib.suppress(OSError):  # Standard error may be closed.
    os.write(2, STOPPED)
  exit_watcher.announce()
  os._exit(EXIT_CODE)
