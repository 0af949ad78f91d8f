"""The pool's side of a worker: begun, asked, waited for and ended.

Workers are plain processes and not Ray actors: what they show lies in memory
that both sides map, which needs one machine anyhow, and a run without Ray has
simulators too. Where Ray spreads a plan's places over machines, a place is an
actor, and the workers of its simulators are that actor's children; they end
with it, however it ends. So one way serves both.
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

from rlinf_jax.envs import shared_memory as shared_memory_lib
from rlinf_jax.envs import simulator, worker

BUILD = 300.0  # Seconds that an environment may take to build.
LEAVE = 2.0  # Seconds to close environments in.
LOG = 1 << 20  # Bytes of output kept.
MAIN = f'from {worker.__name__} import main; main()'
THREADS = (  # Simulators share the cores by processes.
  'OMP_NUM_THREADS',
  'MKL_NUM_THREADS',
  'OPENBLAS_NUM_THREADS',
  'NUMBA_NUM_THREADS',
)


class DiedError(Exception):
  """A worker is no more, or had to be ended."""


class Request(NamedTuple):
  """What a worker was asked.

  Attributes:
    name: 'reset', 'step' or 'replay'.
    rows: environments.
    calls: how often each had been stepped then.
  """

  name: str
  rows: list[int]
  calls: list[int]


class Process:
  """A worker process.

  Attributes:
    rank: its number.
    waiting: what it was asked and has not answered yet, oldest first.
    answered: how many requests it has answered.
    done: when it did what nobody has asked after yet, by such numbers.
    spec: of its environments, once `settle` has returned.
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
    """Starts it, and does not wait until it is there.

    Args:
      make: makes environments.
      rank: its number.
      first: the environment that it builds at once.
      sizes: environments, steps of a call, processes.
      fd: of the memory that is shared.
      idle_timeout: seconds after which it ends, if nothing was stepped.
    """
    self.rank, self.waiting, self.answered = rank, [], 0
    self.spec, self.done = None, {}
    ours, theirs = socket.socketpair()
    end, self._lifeline = os.pipe()
    # Its output is told if it dies. The file has no name, so nothing is left.
    self._log = tempfile.TemporaryFile(mode='a+b')
    with theirs:
      self._child = subprocess.Popen(
        [
          *(sys.executable, '-c', MAIN),
          *map(str, (theirs.fileno(), end, fd, os.getpid())),
        ],
        env=os.environ
        | dict.fromkeys(THREADS, '1')
        | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
        pass_fds=(theirs.fileno(), end, fd),
        stdin=subprocess.DEVNULL,  # A prompt is an error and no hang.
        stdout=self._log,
        stderr=subprocess.STDOUT,
      )
    os.close(end)
    self._mail = connection.Connection(ours.detach())
    with contextlib.suppress(OSError):  # It died; `settle` tells.
      self._mail.send((make, rank, first, sizes, idle_timeout))

  @property
  def pid(self) -> int:
    """Of the operating system."""
    return self._child.pid

  def settle(self) -> simulator.Spec:
    """Waits until its first environment is built.

    Raises:
      UnavailableError: if it cannot be.
    """
    if self.spec is None:
      said = self._hear(BUILD)
      if isinstance(said, simulator.UnavailableError):
        raise said
      self.spec = said
    return self.spec

  def ask(self, name: str, rows: list, memory: shared_memory_lib.Memory):
    """Sends a request: of environments, or pairs that begin with one."""
    at = [row[0] if name == 'replay' else row for row in rows]
    self.waiting.append(Request(name, at, memory.call_N[at].tolist()))
    with contextlib.suppress(OSError):  # It died; `answer` tells.
      self._mail.send((name, rows))

  def answer(
    self,
    memory: shared_memory_lib.Memory,
    step_timeout: float,
    tell: Callable[[worker.Fault | worker.Picture], None],
  ):
    """Waits until its oldest request is done.

    Args:
      memory: shared with it, where it beats.
      step_timeout: seconds that one step of one environment may take.
      tell: told of the failures that it got over, and given pictures.

    Raises:
      DiedError: if it died, or takes longer.
      BrokenError: if an environment begins no episode.
    """
    while not isinstance(said := self._next(memory, step_timeout), worker.Done):
      if isinstance(said, worker.BrokenError):
        raise said
      tell(said)
    self.waiting.pop(0)
    self.answered += 1
    self.done[self.answered] = said
    if os.fstat(self._log.fileno()).st_size > LOG:
      self._log.truncate(0)

  def _next(self, memory, step_timeout: float):
    """What it says next, as long as it beats."""
    beat, waited, tick = None, 0.0, min(1.0, step_timeout / 4)
    while not self._mail.poll(tick):
      # Not by the clock: a machine that was suspended has not waited.
      waited += tick
      of_P = memory.beat_P, memory.at_P, memory.does_P
      now = [int(x_P[self.rank]) for x_P in of_P]
      if now != beat:
        beat, waited = now, 0.0
      builds = now[2] == shared_memory_lib.BUILDING
      allowed = max(BUILD, step_timeout) if builds else step_timeout
      if waited > allowed:
        raise DiedError(f'did not answer for {allowed:g} seconds')
    return self._hear(step_timeout)

  def _hear(self, step_timeout: float) -> Any:
    try:
      if self._mail.poll(step_timeout):
        return self._mail.recv()
    except (EOFError, OSError):
      raise DiedError(self._death()) from None
    raise DiedError(f'did not answer for {step_timeout:g} seconds')

  def _death(self) -> str:
    """How it ended."""
    try:
      code = self._child.wait(5)
    except subprocess.TimeoutExpired:
      return 'closed its mail'
    said = self.output().strip().splitlines()[-1:]
    how = (
      f'was killed by {signal.Signals(-code).name}'
      if code < 0
      else f'ended with code {code}'
    )
    return f'{how} ({said[0].strip()})' if said else how

  def output(self) -> str:
    """What it printed last."""
    size = os.fstat(self._log.fileno()).st_size
    return os.pread(self._log.fileno(), 4096, max(0, size - 4096)).decode(
      errors='replace'
    )

  def kill(self):
    """Ends it, whatever it does."""
    if self._mail.closed:
      return
    self._child.kill()
    self._child.wait()
    self._mail.close()
    os.close(self._lifeline)
    self._log.close()

  def dismiss(self):
    """Lets it close its environments and end."""
    with contextlib.suppress(OSError):
      self._mail.send(None)

  def close(self):
    """Ends it, soon."""
    if not self._mail.closed:
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._child.wait(LEAVE)
    self.kill()
