"""The pool's side of a worker process: starts it, sends requests, ends it.

Workers are plain processes and not Ray actors: observations lie in memory that
both sides map, which needs one machine anyway, and a run without Ray has
simulators too. Where Ray spreads a plan's places over machines, a place is an
actor and its simulators' workers are its children; they end with it, however it
ends. One mechanism serves both.
"""

from collections.abc import Callable
import contextlib
from multiprocessing import connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import shared_memory as shared_memory_lib
from rlinf_jax.envs.processes import worker

BUILD_TIMEOUT = 300.0  # Seconds to build an environment.
CLOSE_TIMEOUT = 2.0  # Seconds to close environments.
LOG_SIZE = 1 << 20  # Bytes of output kept.
MAIN = f'from {worker.__name__} import main; main()'
THREADS = (  # Set to 1: simulators share the cores by processes.
  'OMP_NUM_THREADS',
  'MKL_NUM_THREADS',
  'OPENBLAS_NUM_THREADS',
  'NUMBA_NUM_THREADS',
)


class DiedError(Exception):
  """A worker process has died, or had to be ended."""


class Request(NamedTuple):
  """A request to a worker.

  Attributes:
    name: 'reset', 'step' or 'replay'.
    rows: environments.
    calls: their call counts when it was sent.
  """

  name: str
  rows: list[int]
  calls: list[int]


class Process:
  """A worker process.

  Attributes:
    rank: its number.
    pending: requests that it has not served yet, oldest first.
    num_served: requests that it has served.
    spans: when it served requests, by number, until `ProcessGroup.wait` reads
      them.
    spec: of its environments, once `wait_ready` has returned.
  """

  def __init__(
    self,
    make: simulator.Make,
    rank: int,
    first: int,
    sizes: tuple[int, int, int],
    fd: int,
    idle_timeout: float,
  ):
    """Starts the process, without waiting for it.

    Args:
      make: builds the environment of an index.
      rank: its number.
      first: the environment that it builds at once.
      sizes: environments, steps of a call, processes.
      fd: of the shared memory.
      idle_timeout: seconds without a step after which it exits.
    """
    self.rank, self.pending, self.num_served = rank, [], 0
    self.spec, self.spans = None, {}
    ours, theirs = socket.socketpair()
    end, self._lifeline = os.pipe()
    # Its output, for the message if it dies. An unnamed file leaves no trace.
    self._log = tempfile.TemporaryFile(mode='a+b')
    with theirs:
      fds = theirs.fileno(), end, fd
      self._child = subprocess.Popen(
        [sys.executable, '-c', MAIN, *map(str, (*fds, os.getpid()))],
        env=os.environ
        | dict.fromkeys(THREADS, '1')
        | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
        pass_fds=fds,
        stdin=subprocess.DEVNULL,  # A prompt fails instead of hanging.
        stdout=self._log,
        stderr=subprocess.STDOUT,
      )
    os.close(end)
    self._connection = connection.Connection(ours.detach())
    with contextlib.suppress(OSError):  # It died; `wait_ready` raises.
      self._connection.send((make, rank, first, sizes, idle_timeout))

  @property
  def pid(self) -> int:
    """Process id."""
    return self._child.pid

  def wait_ready(self) -> simulator.Spec:
    """Waits until its first environment is built; returns the spec.

    Raises:
      UnavailableError: if the environment cannot be built.
      DiedError: if the process died.
    """
    if self.spec is None:
      reply = self._receive(BUILD_TIMEOUT)
      if isinstance(reply, simulator.UnavailableError):
        raise reply
      self.spec = reply
    return self.spec

  def request(self, name: str, rows: list, memory: shared_memory_lib.Memory):
    """Sends a request.

    Args:
      name: 'reset', 'step' or 'replay'.
      rows: environments; of 'replay', pairs of one and its actions.
      memory: the shared memory.
    """
    at = [row[0] if name == 'replay' else row for row in rows]
    self.pending.append(Request(name, at, memory.call_N[at].tolist()))
    with contextlib.suppress(OSError):  # It died; `wait` raises.
      self._connection.send((name, rows))

  def wait(
    self,
    memory: shared_memory_lib.Memory,
    step_timeout: float,
    on_message: Callable[[worker.Failure | worker.RenderedFrame], None],
  ):
    """Waits until its oldest request is served.

    Args:
      memory: the shared memory, with its heartbeat.
      step_timeout: seconds that one step of one environment may take.
      on_message: called with each failure and frame.

    Raises:
      DiedError: if it died, or took longer.
      BrokenError: if an environment starts no episode.
    """
    while True:
      message = self._next_message(memory, step_timeout)
      if isinstance(message, worker.Done):
        break
      if isinstance(message, worker.BrokenError):
        raise message
      on_message(message)
    self.pending.pop(0)
    self.num_served += 1
    self.spans[self.num_served] = message
    if os.fstat(self._log.fileno()).st_size > LOG_SIZE:
      self._log.truncate(0)

  def _next_message(self, memory, step_timeout: float):
    """Its next message; waits as long as its heartbeat changes."""
    last, waited, tick = None, 0.0, min(1.0, step_timeout / 4)
    while not self._connection.poll(tick):
      # Counted, not by the clock, which runs on while a machine is suspended.
      waited += tick
      of_P = memory.heartbeat_P, memory.env_P, memory.activity_P
      now = [int(x_P[self.rank]) for x_P in of_P]
      if now != last:
        last, waited = now, 0.0
      building = now[2] == shared_memory_lib.BUILDING
      timeout = max(BUILD_TIMEOUT, step_timeout) if building else step_timeout
      if waited > timeout:
        raise DiedError(f'did not answer for {timeout:g} seconds')
    return self._receive(step_timeout)

  def _receive(self, timeout: float) -> Any:
    try:
      if self._connection.poll(timeout):
        return self._connection.recv()
    except (EOFError, OSError):
      raise DiedError(self._exit_reason()) from None
    raise DiedError(f'did not answer for {timeout:g} seconds')

  def _exit_reason(self) -> str:
    """The reason of its exit, with the last line of its output."""
    try:
      code = self._child.wait(5)
    except subprocess.TimeoutExpired:
      return 'closed its connection'
    last_line = self.output().strip().splitlines()[-1:]
    reason = (
      f'was killed by {signal.Signals(-code).name}'
      if code < 0
      else f'ended with code {code}'
    )
    return f'{reason} ({last_line[0].strip()})' if last_line else reason

  def output(self) -> str:
    """The end of its output."""
    size = os.fstat(self._log.fileno()).st_size
    return os.pread(self._log.fileno(), 4096, max(0, size - 4096)).decode(
      errors='replace'
    )

  def kill(self):
    """Ends it at once."""
    if self._connection.closed:
      return
    self._child.kill()
    self._child.wait()
    self._connection.close()
    os.close(self._lifeline)
    self._log.close()

  def request_exit(self):
    """Asks it to close its environments and exit."""
    with contextlib.suppress(OSError):
      self._connection.send(None)

  def close(self):
    """Waits shortly for its exit, then ends it."""
    if not self._connection.closed:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._child.wait(CLOSE_TIMEOUT)
    self.kill()
