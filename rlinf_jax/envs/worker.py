"""A process that holds some environments, and does what it is asked.

`rlinf_jax.envs.process` starts it and sends it pickled requests. It is a
program of its own and no `multiprocessing` child, since that would run the
caller's main module again, JAX and all, before the first environment is built.
"""

from collections.abc import Callable
import contextlib
import faulthandler
import fcntl
from multiprocessing import connection
import os
import signal
import sys
import time
from typing import NamedTuple

import numpy as np

from rlinf_jax.envs import shared_memory as shared_memory_lib
from rlinf_jax.envs import simulator

WALL = Exception, SystemExit  # Of foreign code, which may even call `exit`.
ATTEMPTS = 3  # To begin an episode, each by another seed.


class Fault(NamedTuple):
  """A failure that was got over.

  Attributes:
    env_id: which environment.
    call: how often it had been stepped before.
    what: a sentence.
  """

  env_id: int
  call: int
  what: str


class Picture(NamedTuple):
  """How an environment looked.

  Attributes:
    env_id: which environment.
    call: how often it had been stepped then.
    frame: uint8 [H, W, 3], or a sentence that says why there is none.
  """

  env_id: int
  call: int
  frame: np.ndarray | str


class Done(NamedTuple):
  """A request was served, from when to when, by `time.perf_counter`."""

  start: float
  end: float


class BrokenError(RuntimeError):
  """An environment that cannot be built, or that begins no episode."""


class Worker:
  """Environments, and the rows of shared memory that are theirs."""

  def __init__(
    self,
    make: simulator.Make,
    rank: int,
    first: int,
    tell: Callable[[Fault | Picture], None],
  ):
    """Builds the first environment, to learn what they look like.

    Args:
      make: makes an environment of its index.
      rank: of this worker.
      first: the environment to build.
      tell: told of failures that are got over, as they happen, and given
        pictures.
    """
    self._make, self._rank, self._tell = make, rank, tell
    self._built = {}
    self._memory = None
    self._built[first] = make(first)
    self.spec = self._built[first].spec

  def share(self, fd: int, N: int, C: int, P: int):
    """Maps the memory that all share."""
    self._memory = shared_memory_lib.Memory(fd, self.spec, N, C, P)

  def serve(self, name: str, rows):
    """Does what is asked."""
    {'reset': self._reset, 'step': self._step, 'replay': self._replay}[name](
      rows
    )
    self._memory.does_P[self._rank] = shared_memory_lib.IDLE

  def close(self):
    """Closes all environments."""
    for i in list(self._built):
      self._discard(i)

  def _reset(self, rows):
    """Begins episodes where environments are."""
    for i in rows:
      self._begin(i, int(self._memory.call_N[i]))
      if self._memory.film_N[i] == shared_memory_lib.YES:
        self._draw(i, int(self._memory.call_N[i]))

  def _step(self, rows):
    """Takes the actions that lie in memory."""
    for i in rows:
      call = int(self._memory.call_N[i])
      if self._advance(i):
        self._begin(i, call + 1)
      self._memory.call_N[i] = call + 1

  def _advance(self, i: int) -> bool:
    """Takes a chunk's steps; returns whether that ended the episode."""
    m = self._memory
    seen = {path: x[i].copy() for path, x in m.obs.items()}
    m.reward_NC[i] = m.terminated_N[i] = m.truncated_N[i] = 0
    m.success_N[i] = m.lost_N[i] = m.steps_N[i] = 0
    if m.dropped_N[i]:
      self._lose(i, seen)
      return True
    for c, action_A in enumerate(m.action_NCA[i]):
      try:
        made = self._ready(i, shared_memory_lib.STEPPING).step(action_A.copy())
        now = self._read(made.obs)
        if not np.isfinite(made.reward):
          raise ValueError(f'its reward is {made.reward}')
      except WALL as error:
        self._note(i, f'failed in `step`: {told(error)}: its episode is lost')
        self._lose(i, seen)
        return True
      seen = now
      m.reward_NC[i, c] = made.reward
      m.steps_N[i] = c + 1
      m.terminated_N[i] = made.terminated
      m.truncated_N[i] = made.truncated and not made.terminated
      m.success_N[i] = max(m.success_N[i], made.success)
      m.beat_P[self._rank] += 1
      if made.terminated or made.truncated:
        break
    ended = bool(made.terminated or made.truncated)
    if m.film_N[i] == shared_memory_lib.YES or (ended and m.film_N[i]):
      self._draw(i, int(m.call_N[i]) + 1)
    self._write(m.final if ended else m.obs, i, seen)
    return ended

  def _draw(self, i: int, call: int):
    """Takes a picture, which must change nothing."""
    m, rank = self._memory, self._rank
    m.at_P[rank], m.does_P[rank] = i, shared_memory_lib.DRAWING
    try:
      frame = np.array(self._built[i].draw(), np.uint8)
      if frame.shape != self.spec.picture.shape:
        raise ValueError(
          f'its picture is {frame.shape} instead of {self.spec.picture.shape}'
        )
    except simulator.UnavailableError as error:
      frame = str(error)
    except WALL as error:
      frame = told(error)
    m.does_P[rank] = shared_memory_lib.STEPPING
    m.beat_P[rank] += 1
    self._tell(Picture(i, call, frame))

  def _lose(self, i: int, seen):
    """Gives an episode up; `seen` is what was last seen of it."""
    m = self._memory
    self._discard(i)
    m.reward_NC[i] = m.success_N[i] = 0
    m.lost_N[i] = m.truncated_N[i] = 1
    m.steps_N[i] = max(1, m.steps_N[i])
    self._write(m.final, i, seen)

  def _begin(self, i: int, call: int):
    """Begins the episode that comes before a call."""
    m = self._memory
    what = 'did not end in time'
    for attempt in range(int(m.attempt_N[i]), ATTEMPTS):
      m.attempt_N[i] = attempt
      seed = simulator.episode_seed(int(m.base_N[i]), call, attempt)
      try:
        ready = self._ready(i, shared_memory_lib.BEGINNING)
        seen = self._read(ready.reset(seed))
      except WALL as error:
        what = f'failed in `reset` by seed {seed}: {told(error)}'
        self._note(i, what)
        self._discard(i)
        continue
      self._write(m.obs, i, seen)
      m.seed_N[i], m.begun_N[i] = seed, call
      m.attempt_N[i] = m.dropped_N[i] = 0
      m.beat_P[self._rank] += 1
      return
    raise BrokenError(
      f'Environment {i} began no episode in {ATTEMPTS} attempts, each by '
      f'another seed; the last {what}.'
    )

  def _replay(self, rows):
    """Brings environments to where memory says they are.

    Args:
      rows: environments, each with the actions [n, C, A] of its episode.
    """
    m = self._memory
    for i, action_nCA in rows:
      try:
        ready = self._ready(i, shared_memory_lib.STEPPING)
        made = self._read(ready.reset(int(m.seed_N[i])))
        for action_A in action_nCA.reshape(-1, action_nCA.shape[-1]):
          made = self._read(ready.step(action_A.copy()).obs)
          m.beat_P[self._rank] += 1
        came = next(
          (
            f'then showed another {path or "observation"}'
            for path, x in made.items()
            if not np.array_equal(x, m.obs[path][i])
          ),
          '',
        )
      except WALL as error:
        came = told(error)
      if came:
        m.dropped_N[i] = 1
        self._note(
          i,
          'was to be brought back by its seed and actions, as its process had '
          f'died, but {came}: its episode is lost',
        )

  def _ready(self, i: int, does: int) -> simulator.Environment:
    """The environment, built if it is not there, and noted to be at work."""
    m, rank = self._memory, self._rank
    m.at_P[rank] = i
    if i not in self._built:
      m.does_P[rank] = shared_memory_lib.BUILDING
      self._built[i] = self._make(i)
    m.does_P[rank] = does
    return self._built[i]

  def _discard(self, i: int):
    """Closes an environment, so that it is built anew."""
    with contextlib.suppress(Exception):
      self._built.pop(i).close()

  def _read(self, obs) -> dict[str, np.ndarray]:
    """An observation by path, as it was promised to be."""
    seen, want = simulator.leaves(obs), simulator.leaves(self.spec.obs)
    if seen.keys() != want.keys():
      raise ValueError(f'it showed {sorted(seen)} instead of {sorted(want)}')
    made = {}
    for path, like in want.items():
      # A copy: simulators show views of what they overwrite.
      x = made[path] = np.array(seen[path], like.dtype)
      name = path or 'observation'
      if x.shape != like.shape:
        raise ValueError(f'its {name} is {x.shape} instead of {like.shape}')
      if x.dtype.kind == 'f' and not np.isfinite(x).all():
        raise ValueError(f'its {name} is not finite')
    return made

  def _write(self, rows, i: int, seen):
    for path, x in seen.items():
      rows[path][i] = x

  def _note(self, i: int, what: str):
    self._tell(Fault(i, int(self._memory.call_N[i]), what))


def told(error: BaseException) -> str:
  """An error of foreign code, in a line."""
  said = ' '.join(str(error).split())
  kind = type(error).__name__
  return f'{kind}: {said}'.removesuffix('.') if said else kind


def die_with_parent(fd: int):
  """Has the kernel end this process when `fd`, a pipe from the parent, closes.

  A signal ends it even where a simulator hangs in C and keeps Python's lock.
  """
  fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
  flags = fcntl.fcntl(fd, fcntl.F_GETFL)
  fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)  # By SIGIO.
  if os.getppid() != int(sys.argv[4]):
    sys.exit('The process that wanted this one is no more.')


def main():
  """Serves requests until there is nobody to make them."""
  mail, lifeline, memory = map(int, sys.argv[1:4])
  die_with_parent(lifeline)
  # Ctrl-C reaches all processes of a terminal, and a scheduler's SIGTERM all of
  # a job: the parent ends its step first, and this process with it.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  faulthandler.enable()
  with contextlib.suppress(EOFError), connection.Connection(mail) as parent:
    try:
      make, rank, first, sizes, idle_timeout = parent.recv()
      worker = Worker(make, rank, first, parent.send)
      parent.send(worker.spec)
      worker.share(memory, *sizes)
    except WALL as error:
      parent.send(error_of(error))
      return
    wanted = False  # Whoever only looked shall not keep simulators.
    while wanted or parent.poll(idle_timeout) or end(idle_timeout):
      if (request := parent.recv()) is None:
        break
      wanted |= request[0] == 'step'
      start = time.perf_counter()
      try:
        worker.serve(*request)
        parent.send(Done(start, time.perf_counter()))
      except BrokenError as error:
        parent.send(error)
    worker.close()


def end(idle_timeout: float):
  """Ends a process that nobody had step; whoever asks for it begins it anew."""
  print(f'it had nothing to do for {idle_timeout:g} seconds')
  sys.exit()


def error_of(error: BaseException) -> simulator.UnavailableError:
  """Why no environment could be built: what our own say is a sentence."""
  if isinstance(error, simulator.UnavailableError):
    return error
  what = f'No environment could be built: {told(error)}.'
  return simulator.UnavailableError(what)
