"""The process of a reward function: calls it, one completion at a time.

It answers in bytes that are no pickles: to read a pickle is to run it, and what
the function parses may have taken this process over.
"""

import importlib
import math
from multiprocessing import connection
import resource
import signal
import struct
import sys
from typing import NamedTuple

REWARD = struct.Struct('d')  # The answer to a completion.


class Limits(NamedTuple):
  """Limits of a call.

  Attributes:
    seconds: that it may take.
    memory: bytes that the process may map.
  """

  seconds: float
  memory: int


class _Late(BaseException):
  """The time is up. No `except Exception` on the way may swallow it."""


def main():
  """Serves completions until the other side closes or ends."""
  pipe = connection.Connection(int(sys.argv[1]))
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The trainer decides.
  try:
    module, name, limits = pipe.recv()
    try:
      function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
      pipe.send_bytes(f'{type(error).__name__}: {error}'.encode())
      return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, most))
    signal.signal(signal.SIGALRM, _raise_late)
    pipe.send_bytes(b'')
    while True:
      reward = _call(function, pipe.recv(), limits.seconds)
      pipe.send_bytes(REWARD.pack(reward))
  except (EOFError, OSError):
    pass  # The trainer has ended.


def _call(function, completion, seconds: float) -> float:
  """The reward of a completion; NaN if the function fails or is late."""
  # Ends a call that no Python signal handler can, even without a trainer.
  used = resource.getrusage(resource.RUSAGE_SELF)
  cpu_seconds = math.ceil(used.ru_utime + used.ru_stime + seconds) + 2
  _, most = resource.getrlimit(resource.RLIMIT_CPU)
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, most))
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    return float(function(completion))
  except (Exception, _Late):  # noqa: BLE001 (Foreign code: any error counts.)
    return math.nan
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_late(*_):
  raise _Late
