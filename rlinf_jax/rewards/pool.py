"""Reward functions in processes of their own, each call with limits.

A parser of completions meets any text at all. Some texts keep it busy forever,
fill the memory or crash the interpreter. Here, only their own reward is lost.
"""

from collections.abc import Sequence
import concurrent.futures
import contextlib
import functools
import inspect
import math
from multiprocessing import connection
import os
import pathlib
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading

from rlinf_jax.rewards import base, worker

MAX_PROCESSES = 8
START_TIMEOUT = 120.0  # Seconds to import the function's module.
GRACE = 1.0  # Seconds for a call to end itself, after its limit.
MAIN = f'from {worker.__name__} import main; main()'


def isolated(
  function: base.Reward,
  *,
  seconds: float = 5.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> base.Batched:
  """A reward function that runs in a bounded pool of processes.

  A call that raises, takes too long, asks for too much memory or ends its
  process has no reward (NaN), and the next one runs in a new process.

  Args:
    function: a function of a module, which the processes import. They call it
      with a completion alone, so what a recipe binds of it has no effect.
    seconds: that one call may take.
    memory: gigabytes that a process may map.
    processes: their number; by default one a CPU, at most `MAX_PROCESSES`.

  Raises:
    ValueError: if the function cannot be imported by its name.
  """
  bare = inspect.unwrap(function)  # Gin wraps what recipes name.
  name = getattr(bare, '__qualname__', '')
  module = getattr(bare, '__module__', '__main__')
  if module == '__main__' or not name.isidentifier():
    raise ValueError(
      f'{function!r} cannot be imported by other processes: put a function '
      'into a module, and give that.'
    )
  return named(
    module, name, seconds=seconds, memory=memory, processes=processes
  )


def named(
  module: str,
  name: str,
  *,
  seconds: float = 5.0,
  memory: float = 2.0,
  processes: int | None = None,
) -> base.Batched:
  """As `isolated`, of a function that this process need not import."""
  if processes is None:
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
  limits = worker.Limits(seconds, int(memory * 2**30))
  return base.Batched(name, _pool(module, name, limits, processes).score)


class Pool:
  """Processes that call one function.

  They start with the first call, and end with this process.
  """

  def __init__(
    self, module: str, name: str, limits: worker.Limits, processes: int
  ):
    """Starts no process yet.

    Args:
      module: that the function is in.
      name: of the function.
      limits: of each call.
      processes: their number.
    """
    self._make = functools.partial(_Process, module, name, limits)
    self._num_processes, self._lock = processes, threading.Lock()
    self._idle = queue.SimpleQueue()
    self._threads = None

  def score(self, completions: Sequence[base.Completion]) -> list[float]:
    """The reward of each completion; NaN where a call failed.

    Raises:
      ImportError: if the processes cannot import the function.
    """
    with self._lock:
      if self._threads is None:
        self._threads = concurrent.futures.ThreadPoolExecutor(
          self._num_processes, 'rewards'
        )
        for _ in range(self._num_processes):
          self._idle.put(self._make())
    return list(self._threads.map(self._call, completions))

  def _call(self, completion: base.Completion) -> float:
    process = self._idle.get()
    try:
      return process.call(completion)
    finally:
      self._idle.put(process)


_pool = functools.cache(Pool)  # Calls of one function share processes.


class _Process:
  """A process that calls the function, replaced when it fails a call."""

  def __init__(self, module: str, name: str, limits: worker.Limits):
    self._request = module, name, limits
    self._limits, self._child = limits, None

  def _start(self):
    """Starts the process and waits until it has imported the function."""
    ours, theirs = socket.socketpair()
    self._log = tempfile.TemporaryFile()
    with theirs:
      self._child = subprocess.Popen(
        [sys.executable, '-c', MAIN, str(theirs.fileno())],
        env=os.environ
        | {
          'PYTHONPATH': os.pathsep.join(
            str(pathlib.Path(path).absolute()) for path in sys.path
          ),
          'OMP_NUM_THREADS': '1',  # The pool is what shares the cores.
          'OPENBLAS_NUM_THREADS': '1',
        },
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=self._log,
      )
    self._connection = connection.Connection(ours.detach())
    error = 'it did not start in time'
    with contextlib.suppress(OSError, EOFError):
      self._connection.send(self._request)
      if self._connection.poll(START_TIMEOUT):
        error = self._connection.recv_bytes().decode(errors='replace')
    if error:
      self._log.seek(0)
      last = self._log.read().decode(errors='replace').strip().splitlines()[-1:]
      self.kill()
      module, name, _ = self._request
      raise ImportError(
        f'A process for rewards cannot import {name} of {module}: '
        f'{"; ".join([error, *last])}.'
      )

  def call(self, completion: base.Completion) -> float:
    """The reward of a completion, or NaN."""
    if self._child is None or self._child.poll() is not None:
      self.kill()
      self._start()
    try:
      self._connection.send(completion)
      if self._connection.poll(self._limits.seconds + GRACE):
        return worker.REWARD.unpack(self._connection.recv_bytes())[0]
    except (OSError, EOFError, struct.error):
      pass  # It ended, such as by a crash of the interpreter, or is not itself.
    self.kill()
    return math.nan

  def kill(self):
    """Ends the process, if there is one."""
    if self._child is not None:
      self._child.kill()
      self._child.wait()
      self._connection.close()
      self._log.close()
      self._child = None
