"""A bounded pool of processes that call one function, each call with limits.

What a model writes may keep a parser or a tool busy forever, fill the memory or
crash the interpreter. Here, only its own call is lost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import json
import math
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
PATIENCE = 1.0  # Seconds between moments in which a waiting thread may end.
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
    ValueError: if the function cannot be imported by its name; or as `named`.
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
  """As `pool`, of a function that this process need not import.

  Raises:
    ValueError: for limits that no call could keep, or no process.
  """
  if processes is None:
    processes = default_processes()
  if not (0 < seconds < math.inf and 0 < memory < math.inf and processes >= 1):
    raise ValueError(
      f'{name} would run for {seconds} seconds, with {memory} GB and in '
      f'{processes} processes: give it finite seconds and GB above 0, and '
      'at least one process.'
    )
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
    self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    self._threads: list[threading.Thread] = []

  def call(self, args: tuple = (), kwargs: Mapping[str, Any] = EMPTY) -> Any:
    """Waits for a process, and returns the result of the function by JSON.

    Raises:
      CallError: if the call failed.
      ImportError: if the processes cannot import the function.
    """
    (result,) = self._results([_Call(args, kwargs)])
    if isinstance(result, CallError):
      raise result
    return result

  def map(self, items: Iterable[Any]) -> list[Any | CallError]:
    """Calls the function with each item; a `CallError` where a call failed."""
    return self._results([_Call((item,), EMPTY) for item in items])

  def _results(self, calls: Sequence['_Call']) -> list[Any | CallError]:
    """Makes calls and waits for them; a caller that is ended drops the rest."""
    with self._lock:
      while len(self._threads) < self._num_processes:
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        self._threads.append(thread)
    try:
      for call in calls:
        self._calls.put(call)
      return [call.result() for call in calls]
    finally:
      for call in calls:
        call.is_needed = False

  def _serve(self):
    """Owns a process, so that no caller that is ended takes it along."""
    process = self._make()
    while True:
      call = self._calls.get()
      if not call.is_needed:
        continue
      try:
        call.answer.put(process.call(call.args, call.kwargs))
      except CallError as error:
        call.answer.put(error)
      except BaseException as error:  # noqa: BLE001 (The caller raises it.)
        process.kill()
        call.answer.put(error)


@dataclasses.dataclass(eq=False)
class _Call:
  """A call of the function.

  Attributes:
    args: of the function.
    kwargs: likewise.
    is_needed: whether its result is waited for.
    answer: holds the result, or the exception, once there is one.
  """

  args: tuple
  kwargs: Mapping[str, Any]
  is_needed: bool = True
  answer: queue.SimpleQueue = dataclasses.field(
    default_factory=queue.SimpleQueue
  )

  def result(self) -> Any | CallError:
    """Waits for the result; raises exceptions that are no `CallError`."""
    while True:
      try:
        found = self.answer.get(timeout=PATIENCE)
        break
      except queue.Empty:
        pass  # Python runs: here, `threads.end` ends this thread.
    if isinstance(found, BaseException) and not isinstance(found, CallError):
      raise found
    return found


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
        error = self._connection.recv_bytes(worker.MAX_REPLY).decode(
          errors='replace'
        )
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
        reply = json.loads(self._connection.recv_bytes(worker.MAX_REPLY))
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
