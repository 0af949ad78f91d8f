"""A worker process, which holds some environments and serves requests.

`process` starts it and sends it pickled requests. It is a program of its own
rather than a `multiprocessing` child, which would run the caller's main module
again, JAX and all, before building an environment.
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

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import shared_memory as shared_memory_lib
from rlinf_jax.system import sigterm

# Errors of foreign code, which may even call `exit`.
FOREIGN_ERRORS = Exception, SystemExit
ATTEMPTS = 3  # To start an episode, each by another seed.


class Failure(NamedTuple):
  """A failure of an environment that the pool has recovered from.

  Attributes:
    env_id: which environment.
    call: its call count before the failure.
    message: the rest of a sentence that starts with the environment.
  """

  env_id: int
  call: int
  message: str


class RenderedFrame(NamedTuple):
  """A rendered environment.

  Attributes:
    env_id: which environment.
    call: its call count.
    image: uint8 [H, W, 3], or why there is none.
  """

  env_id: int
  call: int
  image: np.ndarray | str


class Done(NamedTuple):
  """A request was served, from when to when, by `time.perf_counter`."""

  start: float
  end: float


class BrokenError(RuntimeError):
  """An environment cannot be built, or starts no episode."""


class Worker:
  """Environments, and their rows of shared memory."""

  def __init__(
    self,
    make: simulator.Make,
    rank: int,
    first: int,
    send: Callable[[Failure | RenderedFrame], None],
  ):
    """Builds the first environment, for its spec.

    Args:
      make: builds the environment of an index.
      rank: of this worker.
      first: the environment to build.
      send: sends failures and frames to the pool as they happen.
    """
    self._make, self._rank, self._send = make, rank, send
    self._envs = {}
    self._memory = None
    self._envs[first] = make(first)
    self.spec = self._envs[first].spec

  def share(self, fd: int, N: int, C: int, P: int):
    """Maps the shared memory."""
    self._memory = shared_memory_lib.Memory(fd, self.spec, N, C, P)

  def serve(self, name: str, rows):
    """Serves a request: 'reset', 'step' or 'replay'."""
    serve = {'reset': self._reset, 'step': self._step, 'replay': self._replay}
    serve[name](rows)
    self._memory.activity_P[self._rank] = shared_memory_lib.IDLE

  def close(self):
    """Closes all environments."""
    for i in list(self._envs):
      self._discard(i)

  def rest(self, idle_timeout: float):
    """Exits a process without steps; the next request starts it again."""
    self.close()
    # Last: a simulator that is torn down with its interpreter may write, too.
    print(f'it was idle for {idle_timeout:g} seconds', flush=True)
    os._exit(0)

  def _reset(self, rows):
    """Starts episodes at the environments' call counts."""
    for i in rows:
      self._start_episode(i, int(self._memory.call_N[i]))
      if self._memory.record_N[i] == shared_memory_lib.YES:
        self._render(i, int(self._memory.call_N[i]))

  def _step(self, rows):
    """Takes the actions in memory."""
    for i in rows:
      call = int(self._memory.call_N[i])
      if self._step_chunk(i):
        self._start_episode(i, call + 1)
      self._memory.call_N[i] = call + 1

  def _step_chunk(self, i: int) -> bool:
    """Takes the steps of a chunk; returns whether the episode ended."""
    m = self._memory
    obs = {path: x[i].copy() for path, x in m.obs.items()}
    last = len(m.action_NCA[i]) - 1
    m.reward_NC[i] = m.terminated_N[i] = m.truncated_N[i] = 0
    m.success_N[i] = m.env_failed_N[i] = m.steps_N[i] = 0
    m.chunk_success_N[i] = 0
    if m.abandoned_N[i]:
      self._fail_episode(i, obs)
      return True
    for c, action_A in enumerate(m.action_NCA[i]):
      try:
        env = self._env(i, shared_memory_lib.STEPPING)
        result = self._take(env, action_A, c == last)
        ended = bool(result.terminated or result.truncated)
        # Beyond the range of float32, too: it is infinite in arrays.
        if not abs(result.reward) <= np.finfo(np.float32).max:
          raise ValueError(f'its reward is {result.reward}')
      except FOREIGN_ERRORS as error:
        self._report(
          i, f'failed in `step`: {describe(error)}: its episode is lost'
        )
        self._fail_episode(i, obs)
        return True
      obs = obs if result.obs is None else result.obs
      m.reward_NC[i, c] = result.reward
      m.steps_N[i] = c + 1
      m.terminated_N[i] = result.terminated
      m.truncated_N[i] = result.truncated and not result.terminated
      m.success_N[i] = result.success
      m.chunk_success_N[i] = max(m.chunk_success_N[i], result.success)
      m.heartbeat_P[self._rank] += 1
      if ended:
        break
    if m.record_N[i] == shared_memory_lib.YES or (ended and m.record_N[i]):
      self._render(i, int(m.call_N[i]) + 1)
    self._write(m.final if ended else m.obs, i, obs)
    return ended

  def _take(self, env, action_A, observed: bool) -> simulator.Step:
    """A step, whose observation is by path and checked, or None if unread."""
    if observed:
      result = env.step(action_A.copy())
    else:
      result = simulator.advance(env, action_A.copy())
    ended = result.terminated or result.truncated
    if result.obs is None and not (observed or ended):
      return result
    return result._replace(obs=self._check_obs(result.obs))

  def _render(self, i: int, call: int):
    """Renders an environment, which must change nothing."""
    m, rank = self._memory, self._rank
    m.env_P[rank], m.activity_P[rank] = i, shared_memory_lib.RENDERING
    try:
      image = np.array(self._envs[i].render(), np.uint8)
      if image.shape != self.spec.image.shape:
        raise ValueError(
          f'its image is {image.shape} instead of {self.spec.image.shape}'
        )
    except simulator.UnavailableError as error:
      image = str(error)
    except FOREIGN_ERRORS as error:
      image = describe(error)
    m.activity_P[rank] = shared_memory_lib.STEPPING
    m.heartbeat_P[rank] += 1
    self._send(RenderedFrame(i, call, image))

  def _fail_episode(self, i: int, obs):
    """Truncates an episode that failed; `obs` is its last observation."""
    m = self._memory
    self._discard(i)
    m.reward_NC[i] = m.success_N[i] = m.chunk_success_N[i] = 0
    m.env_failed_N[i] = m.truncated_N[i] = 1
    m.steps_N[i] = max(1, m.steps_N[i])
    self._write(m.final, i, obs)

  def _start_episode(self, i: int, call: int):
    """Starts the episode before a call, in a few attempts.

    Raises:
      BrokenError: if all attempts fail.
    """
    m = self._memory
    message = 'did not end in time'
    for attempt in range(int(m.attempt_N[i]), ATTEMPTS):
      m.attempt_N[i] = attempt
      seed = simulator.episode_seed(int(m.env_seed_N[i]), call, attempt)
      try:
        env = self._env(i, shared_memory_lib.RESETTING)
        obs = self._check_obs(env.reset(seed))
      except FOREIGN_ERRORS as error:
        message = f'failed in `reset` by seed {seed}: {describe(error)}'
        self._report(i, message)
        self._discard(i)
        continue
      self._write(m.obs, i, obs)
      m.episode_seed_N[i], m.first_call_N[i] = seed, call
      m.attempt_N[i] = m.abandoned_N[i] = 0
      m.heartbeat_P[self._rank] += 1
      return
    raise BrokenError(
      f'Environment {i} started no episode in {ATTEMPTS} attempts, each by '
      f'another seed; the last {message}.'
    )

  def _replay(self, rows):
    """Restores environments by replaying the actions of their episodes.

    Args:
      rows: pairs of an environment and the actions [n, C, A] of its episode.
    """
    m = self._memory
    for i, action_nCA in rows:
      try:
        env = self._env(i, shared_memory_lib.STEPPING)
        obs = self._check_obs(env.reset(int(m.episode_seed_N[i])))
        actions = action_nCA.reshape(-1, action_nCA.shape[-1])
        for number, action_A in enumerate(actions, 1):
          result = self._take(env, action_A, number == len(actions))
          obs = obs if result.obs is None else result.obs
          m.heartbeat_P[self._rank] += 1
        problem = next(
          (
            f'then returned another {path or "observation"}'
            for path, x in obs.items()
            if not np.array_equal(x, m.obs[path][i])
          ),
          '',
        )
      except FOREIGN_ERRORS as error:
        problem = describe(error)
      if problem:
        m.abandoned_N[i] = 1
        self._report(
          i,
          'was restored by its seed and actions, as its process had died, but '
          f'{problem}: its episode is lost',
        )

  def _env(self, i: int, activity: int) -> simulator.Environment:
    """Environment `i`, built if needed; notes that it is working."""
    m, rank = self._memory, self._rank
    m.env_P[rank] = i
    if i not in self._envs:
      m.activity_P[rank] = shared_memory_lib.BUILDING
      self._envs[i] = self._make(i)
    m.activity_P[rank] = activity
    return self._envs[i]

  def _discard(self, i: int):
    """Closes an environment; its next use builds it again."""
    with contextlib.suppress(Exception):
      self._envs.pop(i).close()

  def _check_obs(self, obs) -> dict[str, np.ndarray]:
    """An observation by path; raises ValueError if it breaks the spec."""
    leaves, want = simulator.leaves(obs), simulator.leaves(self.spec.obs)
    if leaves.keys() != want.keys():
      raise ValueError(
        f'it returned {sorted(leaves)} instead of {sorted(want)}'
      )
    checked = {}
    for path, array in want.items():
      # A copy, as simulators return views of what they overwrite.
      x = checked[path] = np.array(leaves[path], array.dtype)
      name = path or 'observation'
      if x.shape != array.shape:
        raise ValueError(f'its {name} is {x.shape} instead of {array.shape}')
      if x.dtype.kind == 'f' and not np.isfinite(x).all():
        raise ValueError(f'its {name} is not finite')
    return checked

  def _write(self, rows, i: int, obs):
    for path, x in obs.items():
      rows[path][i] = x

  def _report(self, i: int, message: str):
    self._send(Failure(i, int(self._memory.call_N[i]), message))


def describe(error: BaseException) -> str:
  """An error of foreign code, in one line."""
  message = ' '.join(str(error).split())
  kind = type(error).__name__
  return f'{kind}: {message}'.removesuffix('.') if message else kind


def die_with_parent(fd: int):
  """Has the kernel end this process when `fd`, a pipe from the parent, closes.

  A signal ends it even where a simulator hangs in C and holds Python's lock.
  """
  fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
  flags = fcntl.fcntl(fd, fcntl.F_GETFL)
  fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)  # By SIGIO.
  if os.getppid() != int(sys.argv[4]):
    sys.exit('The parent process has ended.')


def main():
  """Serves requests until the parent process closes its connection."""
  socket, lifeline, memory = map(int, sys.argv[1:4])
  die_with_parent(lifeline)
  # Ctrl-C reaches all processes of a terminal, and a scheduler's SIGTERM all of
  # a job: the parent finishes its step first, and then ends this process.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  sigterm.go_on()
  faulthandler.enable()
  with contextlib.suppress(EOFError), connection.Connection(socket) as parent:
    try:
      make, rank, first, sizes, idle_timeout = parent.recv()
      worker = Worker(make, rank, first, parent.send)
      parent.send(worker.spec)
      worker.share(memory, *sizes)
    except FOREIGN_ERRORS as error:
      parent.send(unavailable(error))
      return
    stepped = False  # Only a process that has stepped keeps idle simulators.
    while stepped or parent.poll(idle_timeout) or worker.rest(idle_timeout):
      if (request := parent.recv()) is None:
        break
      stepped |= request[0] == 'step'
      start = time.perf_counter()
      try:
        worker.serve(*request)
        parent.send(Done(start, time.perf_counter()))
      except BrokenError as error:
        parent.send(error)
    worker.close()


def unavailable(error: BaseException) -> simulator.UnavailableError:
  """Why no environment could be built; our own errors are sentences."""
  if isinstance(error, simulator.UnavailableError):
    return error
  return simulator.UnavailableError(
    f'No environment could be built: {describe(error)}.'
  )
