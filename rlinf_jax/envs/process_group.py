"""The worker processes of a pool: started, asked, waited for, begun anew."""

from collections.abc import Callable, Iterable
import os
import weakref

import numpy as np

from rlinf_jax.envs import episode_log, process, recorder, simulator, worker
from rlinf_jax.envs import shared_memory as shared_memory_lib


class Processes:
  """P of them, with environment i in the one of rank i mod P.

  Attributes:
    spec: what environments show and take.
    memory: that is shared with them.
    episodes: what environments did since theirs began.
    known_N: those that have begun one, bool.
    reel: what of them is filmed.
  """

  def __init__(
    self,
    make: simulator.Make,
    sizes: tuple[int, int, int],
    step_timeout: float,
    idle_timeout: float,
    say: Callable[[str], None],
    tell: Callable[[worker.Fault], None],
  ):
    """Starts the first, to learn what environments look like.

    Args:
      make: makes an environment of its index.
      sizes: environments, steps of a call, processes.
      step_timeout: seconds after which a step or a reset is taken to hang.
      idle_timeout: seconds without a step after which a process exits.
      say: told of processes that died at rest.
      tell: told of failures of environments.

    Raises:
      UnavailableError: if environments cannot be built here.
    """
    self._make, self._sizes = make, sizes
    self._step_timeout, self._idle_timeout = step_timeout, idle_timeout
    self._say, self._tell = say, tell
    self._fd = shared_memory_lib.anonymous()
    self._there: list[process.Process] = []
    self._end = weakref.finalize(self, _close, self._there, self._fd)
    try:
      self._there.append(self._started(0))
      self.spec = self._there[0].settle()
    except process.DiedError as error:
      self.close()
      raise simulator.UnavailableError(
        f'The first environment was to be built, and its process {error}.'
      ) from None
    except BaseException:
      self.close()
      raise
    self.memory = shared_memory_lib.Memory(self._fd, self.spec, *sizes)
    self.episodes = episode_log.Episodes(self.memory, self.spec.horizon)
    self.known_N = np.zeros(sizes[0], bool)
    self.reel = recorder.Reel(self.memory, say)

  @property
  def pids(self) -> list[int]:
    """Of those that are there."""
    return [one.pid for one in self._there]

  def close(self):
    """Ends them all."""
    self._end()

  def start(self):
    """Starts those that are not there."""
    first = len(self._there)
    self._there += map(self._started, range(first, self._sizes[2]))
    for one in self._there[first:]:
      self._agree(one)

  def refuse_busy(self, row_B: Iterable[int]):
    """Refuses rows that are stepping."""
    busy = {i for one in self._there for ask in one.waiting for i in ask.rows}
    if both := sorted(busy & {*map(int, row_B)}):
      raise ValueError(
        f'Environments {both} are stepping: receive what they were sent first.'
      )

  def ask(self, name: str, row_B) -> dict[int, int]:
    """Asks those that hold environments; returns what `hear` shall wait for."""
    return self._ask(name, [(int(i), int(i)) for i in row_B])

  def replay(self, actions: dict[int, np.ndarray]):
    """Brings environments to where memory says, by actions [n, C, A]."""
    # In a process that dies all are replayed at once, so it is asked alone.
    self.hear({x.rank: x.answered + len(x.waiting) for x in self._there})
    self.hear(self._ask('replay', [(i, (i, x)) for i, x in actions.items()]))

  def hear(self, asked: dict[int, int]) -> dict[int, worker.Done]:
    """Waits until processes have answered, whatever it takes; tells when."""
    for rank, count in asked.items():
      died = 0
      while (one := self._there[rank]).answered < count:
        try:
          one.answer(self.memory, self._step_timeout, self._told)
        except process.DiedError as error:
          died += 1
          if died > worker.ATTEMPTS * self._sizes[0]:
            raise worker.BrokenError(
              f'A process of simulators {error}, as did {died - 1} before '
              'it in one call.'
            ) from None
          self._mend(one, error)
    done = {rank: self._there[rank].done for rank in asked}
    return {k: done[k].pop(n) for k, n in asked.items() if n in done[k]}

  def _started(self, rank: int) -> process.Process:
    return process.Process(
      self._make, rank, rank, self._sizes, self._fd, self._idle_timeout
    )

  def _agree(self, one: process.Process):
    """Waits for a process whose environments must look like the first."""
    try:
      spec = one.settle()
    except process.DiedError as error:
      raise worker.BrokenError(
        f'Environment {one.rank} was to be built, and its process {error}.'
      ) from None
    if (spec.obs, spec.low.shape) != (self.spec.obs, self.spec.low.shape):
      raise ValueError(
        f'Environment {one.rank} shows {spec.obs} and takes {spec.low.shape}, '
        f'environment 0 {self.spec.obs} and {self.spec.low.shape}: in a pool '
        'all must be alike.'
      )

  def _ask(self, name: str, requests) -> dict[int, int]:
    """Sends requests, each with its environment, to those that hold them."""
    asked, P = {}, self._sizes[2]
    for rank, one in enumerate(self._there):
      if rows := [request for i, request in requests if i % P == rank]:
        one.ask(name, rows, self.memory)
        asked[rank] = one.answered + len(one.waiting)
    return asked

  def _mend(self, one: process.Process, error: process.DiedError):
    """Begins a process anew and brings its environments to where they were."""
    m, rank = self.memory, one.rank
    at, does = int(m.at_P[rank]), m.does_P[rank]
    one.kill()
    if does == shared_memory_lib.DRAWING:
      self.reel.stop(f'environment {at} was drawn when its process {error}')
    elif does != shared_memory_lib.IDLE:
      m.dropped_N[at] = 1
      m.attempt_N[at] += does != shared_memory_lib.STEPPING
      doing = shared_memory_lib.DOES[does]
      what = f'was {doing} when its process {error}: its episode is lost'
      self._tell(worker.Fault(at, int(m.call_N[at]), what))
    else:
      self._say(f'Process {rank} of simulators {error} and is begun anew.')
    m.does_P[rank] = shared_memory_lib.IDLE
    self._there[rank] = new = self._started(rank)
    # One request more, which nobody waits for; if it died in that, it has it.
    again = one.waiting[0].name == 'replay'
    new.answered = one.answered - (not again)
    self._agree(new)
    begins = {i for ask in one.waiting if ask.name == 'reset' for i in ask.rows}
    replays = []
    for i in range(rank, self._sizes[0], self._sizes[2]):
      if not self.known_N[i] or i in begins or m.dropped_N[i]:
        continue
      if (actions := self.episodes.actions(i)) is None:
        m.dropped_N[i] = 1
        what = 'cannot be brought to where it was: its episode is lost'
        self._tell(worker.Fault(i, int(m.call_N[i]), what))
      else:
        replays.append((i, actions))
    new.ask('replay', replays, m)
    for ask in one.waiting:
      if ask.name != 'replay':
        undone = [
          i
          for i, call in zip(ask.rows, ask.calls, strict=True)
          if ask.name == 'reset' or m.call_N[i] == call
        ]
        new.ask(ask.name, undone, m)

  def _told(self, said: worker.Fault | worker.Picture):
    if isinstance(said, worker.Picture):
      self.reel.take(said)
    else:
      self._tell(said)


def _close(there: list[process.Process], fd: int):
  """Ends processes, first of all those that can end by themselves."""
  for one in there:
    one.dismiss()
  for one in there:
    one.close()
  os.close(fd)
