"""The process of an isolated function: answers one call at a time.

It answers in JSON, not in pickles: to read a pickle is to run it, and what the
function parses may have taken this process over.
"""

import importlib
import json
import math
from multiprocessing import connection
import os
import resource
import signal
import sys
from typing import Any, NamedTuple

from rlinf_jax.system import sigterm

MAX_REPLY = 2**20  # Bytes of a result.


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
  """Serves calls until the other side closes or ends."""
  pipe = connection.Connection(int(sys.argv[1]))
  # Ctrl-C reaches all processes of a terminal, and a scheduler's SIGTERM all of
  # a job: the trainer finishes its step first, with all of its rewards.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  sigterm.go_on()
  try:
    module, name, limits = pipe.recv()
    try:
      function = getattr(importlib.import_module(module), name)
    # A module may raise anything as it is imported, such as for a key that the
    # environment lacks, or end the process.
    except (Exception, SystemExit) as error:  # noqa: BLE001
      pipe.send_bytes(f'{type(error).__name__}: {error}'.encode())
      return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, most))
    signal.signal(signal.SIGALRM, _raise_late)
    # The other side reads why an import failed, and no more: what a function
    # prints for days would fill a disk.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send_bytes(b'')
    while True:
      pipe.send_bytes(_call(function, *pipe.recv(), limits.seconds))
  except (EOFError, OSError):
    pass  # The trainer has ended.


def _call(function, args, kwargs, seconds: float) -> bytes:
  """Calls the function; returns its result, or its error, as JSON."""
  # Ends a call that no Python signal handler can, even without a trainer.
  used = resource.getrusage(resource.RUSAGE_SELF)
  cpu_seconds = math.ceil(used.ru_utime + used.ru_stime + seconds) + 2
  _, most = resource.getrlimit(resource.RLIMIT_CPU)
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, most))
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    return _reply(value=function(*args, **kwargs))
  except _Late:
    return _reply(error=f'it took more than {seconds:g} s')
  except Exception as error:  # noqa: BLE001 (Foreign code: any error counts.)
    return _reply(error=f'{type(error).__name__}: {error}')
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(**content) -> bytes:
  """A result or an error as JSON; an error if the other side reads no more."""
  reply = json.dumps(content, default=_plain).encode()
  if len(reply) <= MAX_REPLY:
    return reply
  return _reply(
    error=f'its result has {len(reply):,} bytes, and the limit is {MAX_REPLY:,}'
  )


def _plain(value: Any) -> float | str:
  """A number, such as of NumPy, as a float; anything else as text."""
  try:
    return float(value)
  except (TypeError, ValueError):
    return str(value)


def _raise_late(*_):
  raise _Late
