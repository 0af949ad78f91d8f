"""Environments in worker processes, stepped together and in order.

N environments are spread over P processes, environment i in process i mod P, so
that any run of rows keeps all of them busy: while a policy acts on one half of
the rows, every process steps environments of the other half. A call is one
message a process; observations and actions lie in memory that both sides map.

A row's token says which environment it is, how often that was stepped, and its
seed. A token is used in order. With what `save` says of it any process can go
on from it, or this one go back to it: seeds and actions bring episodes back.

An environment that fails loses its episode and no other. Where its whole
process is lost with it, the others of that process are brought back by their
seeds and the actions of their episodes, and are checked to show what they did.
"""

import collections
from collections.abc import Callable
import contextlib
import os
from typing import NamedTuple
import weakref

import numpy as np

from rlinf_jax import told
from rlinf_jax.worlds import environment, episodes, process, worker
from rlinf_jax.worlds import memory as memory_lib
from stages import base

FAILURES = 10  # In a row, after which an environment is given up.
INDEX, CALL, SEED = range(3)  # Columns of a token.


class Ticket(NamedTuple):
  """Steps that are under way.

  Attributes:
    pool: that makes them.
    rows: environments.
    token: after the steps.
    asked: requests that must be answered, by process.
  """

  pool: 'Pool'
  rows: np.ndarray
  token: np.ndarray
  asked: dict[int, int]

  def result(self):
    """As `Pool.receive`."""
    return self.pool.receive(self)

  def cancel(self):
    """Waits all the same: until then nobody can step these environments."""
    with contextlib.suppress(worker.BrokenError):
      self.pool.receive(self)


class Pool:
  """N environments in P processes, which end with this one.

  Attributes:
    spec: what environments show and take.
    faults: the failures that were got over, oldest first, the last thousand.
    lost: how many episodes were lost to them.
    restarted: how many began anew, as they could not be saved.
  """

  def __init__(
    self,
    make: environment.Make,
    n: int,
    processes: int = 1,
    *,
    chunk: int = 1,
    discount: float = 1.0,
    patience: float = 60.0,
    say: Callable[[str], None] = told.say,
  ):
    """Starts the first process, to learn what environments look like.

    Args:
      make: makes an environment of its index, in a worker: a function of a
        module, or a `functools.partial` of one.
      n: how many environments.
      processes: to spread them over.
      chunk: steps of a call, if actions are chunks.
      discount: γ of a chunk's reward, Σₖ γᵏ rₖ over the steps that were made.
      patience: seconds after which a step or a reset is taken to hang.
      say: told of every failure that is got over.

    Raises:
      UnavailableError: if environments cannot be built here.
    """
    _refuse(make, n, processes, chunk)
    self._make, self._sizes = make, (n, chunk, processes)
    self._patience, self._say, self._discount = patience, say, discount
    self._fd = memory_lib.anonymous()
    self._processes: list[process.Process] = []
    self._end = weakref.finalize(self, _close, self._processes, self._fd)
    self.faults = collections.deque(maxlen=1000)
    self.lost = self.restarted = 0
    try:
      self._processes.append(self._started(0))
      self.spec = self._processes[0].settle()
    except process.DiedError as error:
      self.close()
      raise environment.UnavailableError(
        f'The first environment was to be built, and its process {error}.'
      ) from None
    except BaseException:
      self.close()
      raise
    self._memory = memory_lib.Memory(self._fd, self.spec, *self._sizes)
    self._failures = np.zeros(n, int)  # In a row.
    self._known = np.zeros(n, bool)  # Begun by a token.
    self._episodes = episodes.Episodes(self._memory, self.spec.horizon)

  def __len__(self):
    return self._sizes[0]

  def __repr__(self):
    n, chunk, processes = self._sizes
    return f'Pool({self._make}, {n}, {processes}, chunk={chunk})'

  @property
  def pids(self) -> list[int]:
    """Of the worker processes that are there."""
    return [one.pid for one in self._processes]

  @property
  def episode(self) -> tuple[int, int, int]:
    """Shape [K, C, A] of the actions of the longest episode."""
    return self._episodes.longest, *self._memory.action_NCA.shape[1:]

  def close(self):
    """Ends all processes."""
    self._end()

  def init(self, seed_B):
    """Begins episodes by seeds, whatever was under way.

    Args:
      seed_B: of the first environments, in [0, 2³¹).

    Returns:
      A token, int32 [B, 3], and what is seen, a tree of [B, ...].
    """
    seed_B = np.asarray(seed_B, np.int32)
    row_B = np.arange(len(seed_B))
    if len(seed_B) > len(self):
      raise ValueError(
        f'{len(seed_B)} seeds for {len(self)} environments: make the pool as '
        'large as the batch.'
      )
    self._idle(row_B)
    self._restart(row_B, 0 * row_B, seed_B)
    token = np.stack([row_B, 0 * row_B, seed_B], 1).astype(np.int32)
    return token, self._seen(self._memory.obs, row_B)

  def step(self, token, action):
    """Acts: `send`, then `receive`."""
    return self.receive(self.send(token, action))

  def send(self, token, action) -> Ticket:
    """Has environments act, and does not wait for them.

    Args:
      token: int32 [B, 3], as `init` or the call before returned it.
      action: [B, A], or chunks [B, C, A].
    """
    token, action = np.asarray(token), np.asarray(action, np.float32)
    self._check(token, action)
    row_B = token[:, INDEX].astype(np.int64)
    self._idle(row_B)
    self._memory.action_NCA[row_B] = (
      action if action.ndim == 3 else action[:, None]
    )
    for i in row_B:
      self._episodes.remember(i)
    asked = self._ask('step', row_B)
    token = token.copy()
    token[:, CALL] += 1
    return Ticket(self, row_B, token, asked)

  def receive(self, ticket: Ticket):
    """Waits for what `send` began.

    Returns:
      The token to go on with, and the `stages.base.Outcome`.

    Raises:
      BrokenError: if an environment cannot be brought to begin an episode.
    """
    self._hear(ticket.asked)
    m, row_B = self._memory, ticket.rows
    reward_BC = m.reward_NC[row_B]
    gamma_C = np.float32(self._discount) ** np.arange(reward_BC.shape[1])
    ended_B, lost_B = m.begun_N[row_B] == m.call_N[row_B], m.lost_N[row_B]
    obs, final = self._seen(m.obs, row_B), self._seen(m.obs, row_B)
    for path, x in environment.leaves(final).items():
      x[ended_B] = m.final[path][row_B[ended_B]]
    self._count(row_B, lost_B)
    return ticket.token, base.Outcome(
      obs=obs,
      reward=(reward_BC * gamma_C).sum(1, dtype=np.float32),
      terminated=m.terminated_N[row_B],
      truncated=m.truncated_N[row_B],
      final_obs=final,
      success=m.success_N[row_B],
      steps=m.steps_N[row_B],
      lost=lost_B,
    )

  def save(self, token) -> episodes.Past:
    """What, with a token, is enough to go on in any process."""
    return self._episodes.past(np.asarray(token)[:, INDEX])

  def load(self, token, past: episodes.Past):
    """Has environments where a token and its past say, and returns the token.

    Those that are elsewhere are brought there by their seeds and actions.
    """
    token = np.asarray(token)
    row_B, call_B, seed_B = token.T.astype(np.int64)
    self._idle(row_B)
    m = self._memory
    away_B = ~self._known[row_B] | (m.base_N[row_B] != seed_B)
    away_B |= m.call_N[row_B] != call_B
    away_B |= episodes.differ(self._episodes.past(row_B), past)
    if away_B.any():
      self._bring(np.flatnonzero(away_B), row_B, call_B, seed_B, past)
    return token

  def _bring(self, away, row_B, call_B, seed_B, past):
    """Brings rows `away` of a token to where they were."""
    self._start()
    for one in self._processes:  # A process that dies is asked once for all.
      self._hear({one.rank: one.answered + len(one.waiting)})
    self._known[row_B[away]] = True
    self._memory.base_N[row_B[away]] = seed_B[away]
    replays = collections.defaultdict(list)
    lost = moved = 0
    for b in away:
      i, call = int(row_B[b]), int(call_B[b])
      actions = self._episodes.put(i, call, past, b)
      if actions is None:
        lost += 1
      else:
        moved += len(actions) > 0
        replays[i % self._sizes[2]].append((i, actions))
    asked = {}
    for rank, rows in replays.items():
      one = self._processes[rank]
      one.ask('replay', rows, self._memory)
      asked[rank] = one.answered + len(one.waiting)
    self._hear(asked)
    if moved:
      self._say(f'{moved} episodes are gone on with, by their seeds and actions.')
    if lost:
      self.restarted += lost
      self._say(f'{lost} environments begin new episodes: those were not saved.')

  def _count(self, row_B, lost_B):
    """Counts lost episodes; gives up on what only ever fails."""
    self.lost += int(lost_B.sum())
    self._failures[row_B] = np.where(lost_B, self._failures[row_B] + 1, 0)
    for i in row_B[self._failures[row_B] >= FAILURES]:
      whats = (x.what for x in reversed(self.faults) if x.environment == i)
      what = next(whats, 'was in another process')
      raise worker.BrokenError(
        f'Environment {i} failed {FAILURES} times in a row; the last time it '
        f'{what}.'
      )

  def _started(self, rank: int) -> process.Process:
    return process.Process(self._make, rank, rank, self._sizes, self._fd)

  def _start(self):
    """Starts the processes that are not there."""
    first = len(self._processes)
    self._processes += map(self._started, range(first, self._sizes[2]))
    for one in self._processes[first:]:
      self._agree(one)

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

  def _seen(self, rows, row_B):
    """Copies: memory is written again by the next step."""
    return environment.tree({path: x[row_B] for path, x in rows.items()})

  def _check(self, token, action):
    """Refuses what is out of order, or of another shape."""
    (n, C, _), (A,) = self._sizes, self.spec.low.shape
    want = (len(token), A) if action.ndim == 2 else (len(token), C, A)
    if action.shape != want or (action.ndim == 2 and C != 1):
      chunks = f'[{len(token)}, {C}, {A}]' if C > 1 else f'[{len(token)}, {A}]'
      raise ValueError(
        f'Actions of {len(token)} environments must be {chunks}, and are '
        f'{list(action.shape)}.'
      )
    row_B = token[:, INDEX]
    if len({*row_B.tolist()}) < len(row_B) or not (0 <= row_B).all():
      raise ValueError('A token must name each of its environments once.')
    if row_B.max() >= n:
      raise ValueError(f'Environment {row_B.max()} is not one of {n}.')
    row_B, call_B, seed_B = token.T.astype(np.int64)
    here_B = self._known[row_B] & (self._memory.base_N[row_B] == seed_B)
    for i, call, here in zip(row_B, call_B, here_B, strict=True):
      at = f'at {self._memory.call_N[i]}' if here else 'of another token here'
      if not here or call != self._memory.call_N[i]:
        raise ValueError(
          f'Environment {i} was to make call {call}, but is {at}: each token is '
          'used once and where it was made. To go on elsewhere, or from an '
          'earlier one, `load` it with what `save` has said of it.'
        )

  def _idle(self, row_B):
    """Refuses rows that are stepping."""
    busy = {
      i for one in self._processes for ask in one.waiting for i in ask.rows
    }
    if both := sorted(busy & {*row_B.tolist()}):
      raise ValueError(
        f'Environments {both} are stepping: receive what they were sent first.'
      )

  def _restart(self, row_B, call_B, seed_B):
    """Begins episodes where tokens say that environments are."""
    self._start()
    m = self._memory
    m.base_N[row_B], m.call_N[row_B] = seed_B, call_B
    m.attempt_N[row_B] = m.dropped_N[row_B] = 0
    for i in row_B:
      self._episodes.forget(i)
    self._hear(self._ask('reset', row_B))
    self._known[row_B] = True

  def _ask(self, name: str, row_B) -> dict[int, int]:
    """Asks the processes that hold environments; returns what to wait for."""
    asked, P = {}, self._sizes[2]
    for rank, one in enumerate(self._processes):
      if rows := [int(i) for i in row_B if i % P == rank]:
        one.ask(name, rows, self._memory)
        asked[rank] = one.answered + len(one.waiting)
    return asked

  def _hear(self, asked: dict[int, int]):
    """Waits until processes have answered, whatever it takes."""
    for rank, count in asked.items():
      died = 0
      while (one := self._processes[rank]).answered < count:
        try:
          one.answer(self._memory, self._patience, self._tell)
        except process.DiedError as error:
          died += 1
          if died > worker.ATTEMPTS * len(self):
            raise worker.BrokenError(
              f'A process of simulators {error}, as did {died - 1} before '
              'it in one call.'
            ) from None
          self._mend(one, error)

  def _mend(self, one: process.Process, error: process.DiedError):
    """Begins a process anew and brings its environments to where they were."""
    m, rank = self._memory, one.rank
    at, does = int(m.at_P[rank]), m.does_P[rank]
    one.kill()
    if does != memory_lib.IDLE:
      m.dropped_N[at] = 1
      m.attempt_N[at] += does != memory_lib.STEPPING
      doing = memory_lib.DOES[does]
      what = f'was {doing} when its process {error}: its episode is lost'
      self._tell(worker.Fault(at, int(m.call_N[at]), what))
    else:
      self._say(f'Process {rank} of simulators {error} and is begun anew.')
    m.does_P[rank] = memory_lib.IDLE
    self._processes[rank] = new = self._started(rank)
    # One request more, which nobody waits for; if it died in that, it has it.
    again = one.waiting[0].name == 'replay'
    new.answered = one.answered - (not again)
    self._agree(new)
    begins = {i for ask in one.waiting if ask.name == 'reset' for i in ask.rows}
    replays = []
    for i in range(rank, len(self), self._sizes[2]):
      if not self._known[i] or i in begins or m.dropped_N[i]:
        continue
      if (actions := self._episodes.actions(i)) is None:
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

  def _tell(self, fault: worker.Fault):
    self.faults.append(fault)
    self._say(
      f'Environment {fault.environment}, at call {fault.call}, {fault.what}.'
    )


def _close(processes: list[process.Process], fd: int):
  """Ends processes, first of all those that can end by themselves."""
  for one in processes:
    one.dismiss()
  for one in processes:
    one.close()
  os.close(fd)


def _refuse(make, n: int, processes: int, chunk: int):
  """Raises for what cannot be a pool."""
  if not 1 <= processes <= n or chunk < 1:
    raise ValueError(
      f'{n} environments in {processes} processes, {chunk} steps a call: there '
      'must be at least one of each, and no process without an environment.'
    )
  if getattr(make, 'func', make).__module__ == '__main__':
    raise ValueError(
      'What makes environments is called in other processes, which cannot see '
      'the main program: put it in a module of its own.'
    )
