"""The worker processes of a pool: requests, waiting, and recovery."""

from collections.abc import Callable, Iterable
import os
import weakref

import numpy as np

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import episode_log, process, recorder, worker
from rlinf_jax.envs.processes import shared_memory as shared_memory_lib


class ProcessGroup:
  """P worker processes; environment i lives in the one of rank i mod P.

  Attributes:
    spec: of the environments.
    memory: shared with the processes.
    episodes: the actions of running episodes.
    initialized_N: environments that have started an episode, bool.
    recorder: of videos.
  """

  def __init__(
    self,
    make: simulator.Make,
    sizes: tuple[int, int, int],
    step_timeout: float,
    idle_timeout: float,
    say: Callable[[str], None],
    on_failure: Callable[[worker.Failure], None],
  ):
    """Starts the first process, for the spec of its environment.

    Args:
      make: builds the environment of an index.
      sizes: environments, steps of a call, processes.
      step_timeout: seconds after which a step or a reset counts as hanging.
      idle_timeout: seconds without a step after which a process exits.
      say: told of processes that died while idle.
      on_failure: called with failures of environments.

    Raises:
      UnavailableError: if environments cannot be built here.
    """
    self._make, self._sizes = make, sizes
    self._step_timeout, self._idle_timeout = step_timeout, idle_timeout
    self._say, self._on_failure = say, on_failure
    self._fd = shared_memory_lib.anonymous()
    self._processes: list[process.Process] = []
    self._end = weakref.finalize(self, _close, self._processes, self._fd)
    try:
      self._processes.append(self._new_process(0))
      self.spec = self._processes[0].wait_ready()
    except process.DiedError as error:
      self.close()
      raise simulator.UnavailableError(
        f'While the first environment was being built, its process {error}.'
      ) from None
    except BaseException:
      self.close()
      raise
    self.memory = shared_memory_lib.Memory(self._fd, self.spec, *sizes)
    self.episodes = episode_log.EpisodeLog(self.memory, self.spec.horizon)
    self.initialized_N = np.zeros(sizes[0], bool)
    self.recorder = recorder.Recorder(self.memory, say)

  @property
  def pids(self) -> list[int]:
    """Process ids of the processes that have been started."""
    return [child.pid for child in self._processes]

  def close(self):
    """Ends all processes."""
    self._end()

  def start(self):
    """Starts the processes that have not been started."""
    first = len(self._processes)
    self._processes += map(self._new_process, range(first, self._sizes[2]))
    for child in self._processes[first:]:
      self._check_spec(child)

  def check_not_stepping(self, row_B: Iterable[int]):
    """Raises ValueError for rows that are stepping."""
    busy = {
      i
      for child in self._processes
      for request in child.pending
      for i in request.rows
    }
    if both := sorted(busy & {*map(int, row_B)}):
      raise ValueError(
        f'Environments {both} are stepping: call `recv` for them first.'
      )

  def request(self, name: str, row_B) -> dict[int, int]:
    """Sends a request for environments.

    Returns:
      For each process, the number of requests served once this one is; an
      argument of `wait`.
    """
    return self._request(name, [(int(i), int(i)) for i in row_B])

  def replay(self, actions: dict[int, np.ndarray]):
    """Restores environments by their seeds in memory and actions [n, C, A]."""
    # A process that dies replays all its environments, so none may be pending.
    self.wait({x.rank: x.num_served + len(x.pending) for x in self._processes})
    pairs = [(i, (i, x)) for i, x in actions.items()]
    self.wait(self._request('replay', pairs))

  def wait(self, counts: dict[int, int]) -> dict[int, worker.Done]:
    """Waits until processes have served as many requests; restarts dead ones.

    Returns:
      When each process served its request, by rank.

    Raises:
      BrokenError: if processes die again and again.
    """
    for rank, count in counts.items():
      deaths = 0
      while (child := self._processes[rank]).num_served < count:
        try:
          child.wait(self.memory, self._step_timeout, self._on_message)
        except process.DiedError as error:
          deaths += 1
          if deaths > worker.ATTEMPTS * self._sizes[0]:
            raise worker.BrokenError(
              f'A simulator process {error}, after {deaths - 1} others in one '
              'call.'
            ) from None
          self._restart(child, error)
    spans = {rank: self._processes[rank].spans for rank in counts}
    return {k: spans[k].pop(n) for k, n in counts.items() if n in spans[k]}

  def _new_process(self, rank: int) -> process.Process:
    return process.Process(
      self._make, rank, rank, self._sizes, self._fd, self._idle_timeout
    )

  def _check_spec(self, child: process.Process):
    """Waits for a process and checks that its spec is that of the first."""
    try:
      spec = child.wait_ready()
    except process.DiedError as error:
      raise worker.BrokenError(
        f'While environment {child.rank} was being built, its process {error}.'
      ) from None
    if (spec.obs, spec.low.shape) != (self.spec.obs, self.spec.low.shape):
      raise ValueError(
        f'Environment {child.rank} has observations {spec.obs} and actions '
        f'{spec.low.shape}, environment 0 has {self.spec.obs} and '
        f'{self.spec.low.shape}: in a pool all must have the same.'
      )

  def _request(self, name: str, rows) -> dict[int, int]:
    """Sends rows, each with its environment, to the processes that hold it."""
    counts, P = {}, self._sizes[2]
    for rank, child in enumerate(self._processes):
      if mine := [row for i, row in rows if i % P == rank]:
        child.request(name, mine, self.memory)
        counts[rank] = child.num_served + len(child.pending)
    return counts

  def _restart(self, child: process.Process, error: process.DiedError):
    """Restarts a process, restores its environments, resends its requests."""
    m, rank = self.memory, child.rank
    at, activity = int(m.env_P[rank]), m.activity_P[rank]
    child.kill()
    if activity == shared_memory_lib.RENDERING:
      self.recorder.disable(
        f'environment {at} was rendering when its process {error}'
      )
    elif activity != shared_memory_lib.IDLE:
      m.abandoned_N[at] = 1
      m.attempt_N[at] += activity != shared_memory_lib.STEPPING
      doing = shared_memory_lib.ACTIVITIES[activity]
      self._report(
        at, f'was {doing} when its process {error}: its episode is lost'
      )
    else:
      self._say(f'Process {rank} of the simulators {error} and is restarted.')
    m.activity_P[rank] = shared_memory_lib.IDLE
    self._processes[rank] = new = self._new_process(rank)
    # The replay below is one request more, unless it died in a replay.
    replaying = child.pending[0].name == 'replay'
    new.num_served = child.num_served - (not replaying)
    self._check_spec(new)
    new.request('replay', self._to_replay(child), m)
    for request in child.pending:
      if request.name != 'replay':
        unserved = [
          i
          for i, call in zip(request.rows, request.calls, strict=True)
          if request.name == 'reset' or m.call_N[i] == call
        ]
        new.request(request.name, unserved, m)

  def _to_replay(self, child: process.Process) -> list[tuple[int, np.ndarray]]:
    """Environments of a dead process, with the actions that restore them."""
    m = self.memory
    resetting = {
      i
      for request in child.pending
      if request.name == 'reset'
      for i in request.rows
    }
    pairs = []
    for i in range(child.rank, self._sizes[0], self._sizes[2]):
      if not self.initialized_N[i] or i in resetting or m.abandoned_N[i]:
        continue
      if (actions := self.episodes.actions(i)) is None:
        m.abandoned_N[i] = 1
        self._report(i, 'cannot be restored: its episode is lost')
      else:
        pairs.append((i, actions))
    return pairs

  def _report(self, i: int, message: str):
    self._on_failure(worker.Failure(i, int(self.memory.call_N[i]), message))

  def _on_message(self, message: worker.Failure | worker.RenderedFrame):
    if isinstance(message, worker.RenderedFrame):
      self.recorder.add(message)
    else:
      self._on_failure(message)


def _close(processes: list[process.Process], fd: int):
  """Ends processes; first asks all of them to exit."""
  for child in processes:
    child.request_exit()
  for child in processes:
    child.close()
  os.close(fd)
