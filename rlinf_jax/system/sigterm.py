"""SIGTERM in processes that a run starts, and in what these start.

A scheduler sends it to all processes of a job. The run finishes its step first,
with the help of the processes that it has started, and ends them then.
"""

import os
import signal


def go_on():
  """Lets this process go on after SIGTERM; it ends what this one starts.

  Programs inherit that a signal is ignored, and could not be ended by it. They
  do not inherit a handler.
  """
  signal.signal(signal.SIGTERM, _do_nothing)
  signal.siginterrupt(signal.SIGTERM, False)  # C code may not call again.
  os.register_at_fork(
    before=_block, after_in_parent=_unblock, after_in_child=_end_by_sigterm
  )


def _do_nothing(*_):
  """Handles a signal."""


def _block():
  signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock():
  signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_by_sigterm():
  """Lets SIGTERM end a fork, also one that was sent as it began."""
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  _unblock()
