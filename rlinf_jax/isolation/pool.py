"""A bounded pool of processes that call one function, each call with limits.

What a model writes may keep a parser or a tool busy forever, fill the memory or
crash the interpreter. Here, only its own call is lost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import concurrent.futures
import contextlib
import functools
import inspect
import json
from multiprocessing import connection
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

from rlinf_jax.isolation import worker

MAX_PROCESSES = 8
START_TIMEOUT = 120.0  # Seconds to import the function's module.
GRACE = 1.0  # Seconds for a call to end itself, after its limit.
MAX_REPLY = 2**20  # Bytes of a result.
EMPTY: Mapping[str, Any] = {}
MAIN = f'from {worker.__name__} import main; main()'


class CallError(Exception):
  """A call raised, took too long or ended its process; the message says so."""


def pool(
  function: Callable,
  *,
  seconds: float,
  memory: float,
  processes: int | None = None,
) -> 'Pool':
  """The pool of a function of a module; those of equal arguments share it.

  Args:
    function: the function, which the processes import.
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
  seconds: float,
  memory: float,
  processes: int | None = None,
) -> 'Pool':
  """As `pool`, of a function that this process need not import."""
  if processes is None:
    processes = default_processes()
  limits = worker.Limits(seconds, int(memory * 2**30))
  return _pool(module, name, limits, processes)


def default_processes() -> int:
  """The processes of a pool: one a CPU, at most `MAX_PROCESSES`."""
  return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


class Pool:
  """Processes that call one function.

  They start with the first call, and end with this process.

  Attributes:
    name: of the function.
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
    self.name = name
    self._make = functools.partial(_Process, module, name, limits)
    self._num_processes, self._lock = processes, threading.Lock()
    self._idle = None

  def call(self, args: tuple = (), kwargs: Mapping[str, Any] = EMPTY) -> Any:
    """Waits for a process, and returns the result of the function by JSON.

    Raises:
      CallError: if the call failed.
      ImportError: if the processes cannot import the function.
    """
    with self._lock:
      if self._idle is None:
        self._idle = queue.SimpleQueue()
        for _ in range(self._num_processes):
          self._idle.put(self._make())
    process = self._idle.get()
    try:
      return process.call(args, kwargs)
    finally:
      self._idle.put(process)

  def map(self, items: Iterable[Any]) -> list[Any | CallError]:
    """Calls the function with each item; a `CallError` where a call failed."""
    return list(self._threads.map(self._result, items))

  def _result(self, item: Any) -> Any | CallError:
    try:
      return self.call((item,))
    except CallError as error:
      return error

  @functools.cached_property
  def _threads(self):
    return concurrent.futures.ThreadPoolExecutor(
      self._num_processes, 'isolation'
    )


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
    self._socket = ours
    self._connection = connection.Connection(os.dup(ours.fileno()))
    try:
      with self._deadline(START_TIMEOUT):
        self._connection.send(self._request)
        error = self._connection.recv_bytes(MAX_REPLY).decode(errors='replace')
    except TimeoutError:
      error = 'it did not start in time'
    except (OSError, EOFError):
      error = 'its process ended'
    if error:
      self._log.seek(0)
      last = self._log.read().decode(errors='replace').strip().splitlines()[-1:]
      self.kill()
      module, name, _ = self._request
      raise ImportError(
        f'A process of its own cannot import {name} of {module}: '
        f'{"; ".join([error, *last])}.'
      )

  def call(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of the function.

    Raises:
      CallError: if the call failed.
    """
    if self._child is None or self._child.poll() is not None:
      self.kill()
      self._start()
    try:
      with self._deadline(self._limits.seconds + GRACE):
        self._connection.send((args, kwargs))
        reply = json.loads(self._connection.recv_bytes(MAX_REPLY))
      if 'error' not in reply:
        return reply['value']
      raise CallError(str(reply['error']))
    except TimeoutError:
      error = f'it took more than {self._limits.seconds:g} s'
    # It ended, such as by a crash of the interpreter, or is not itself.
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
      error = 'its process ended'
    self.kill()
    raise CallError(error)

  @contextlib.contextmanager
  def _deadline(self, seconds: float) -> Iterator[None]:
    """Ends what waits on the connection after a time.

    The process may take nothing of a message, or stop in the middle of its
    reply. Shutting the socket down ends both waits, even where a process that
    it started holds the other end too.

    Raises:
      TimeoutError: if the time has passed; the connection is of no more use.
    """
    is_late = threading.Event()

    def end():
      is_late.set()
      with contextlib.suppress(OSError):  # The other end may be gone.
        self._socket.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
      yield
    finally:
      timer.cancel()
      timer.join()  # From here on, the socket stays as it is.
      if is_late.is_set():
        raise TimeoutError

  def kill(self):
    """Ends the process, if there is one."""
    if self._child is not None:
      self._child.kill()
      self._child.wait()
      self._connection.close()
      self._socket.close()
      self._log.close()
      self._child = None
