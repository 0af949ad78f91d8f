"""Threads of foreign code, which are ended from outside."""

import ctypes
import threading


def end(thread: threading.Thread):
  """Ends a thread by a SystemExit that is raised in it.

  It is raised when the thread next runs Python: what it computes outside, or
  waits for, ends first.
  """
  ctypes.pythonapi.PyThreadState_SetAsyncExc(
    ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
  )
