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
from typing import NamedTuple

import numpy as np

from rlinf_jax.envs import episode_log, simulator, worker
from rlinf_jax.envs import process_group as process_group_lib
from rlinf_jax.run import notices
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
    elsewhere: processes that have done it, from when to when.
  """

  pool: 'Pool'
  rows: np.ndarray
  token: np.ndarray
  asked: dict[int, int]
  elsewhere: list[tuple[str, float, float]]

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
    failed_episodes: how many episodes were lost to them.
    restarted_episodes: how many began anew, as they could not be saved.
  """

  def __init__(
    self,
    make: simulator.Make,
    n: int,
    processes: int = 1,
    *,
    chunk: int = 1,
    discount: float = 1.0,
    step_timeout: float = 60.0,
    idle_timeout: float = 120.0,
    say: Callable[[str], None] = notices.notify,
  ):
    """Starts the first process, to learn what environments look like.

    Args:
      make: makes an environment of its index, in a worker: a function of a
        module, or a `functools.partial` of one.
      n: how many environments.
      processes: to spread them over.
      chunk: steps of a call, if actions are chunks.
      discount: γ of a chunk's reward, Σₖ γᵏ rₖ over the steps that were made.
      step_timeout: seconds after which a step or a reset is taken to hang.
      idle_timeout: seconds without a step after which a worker process exits.
        The next request starts it again. A process that only traces a step
        thereby keeps no idle simulators.
      say: told of every failure that is got over.

    Raises:
      UnavailableError: if environments cannot be built here.
    """
    _refuse(make, n, processes, chunk)
    self._make, self._sizes = make, (n, chunk, processes)
    self._say, self._discount = say, discount
    self.faults = collections.deque(maxlen=1000)
    self.failed_episodes = self.restarted_episodes = 0
    faults = self.faults  # Not `self`, which ends with its last reader.

    def tell(fault: worker.Fault):
      faults.append(fault)
      say(f'Environment {fault.env_id}, at call {fault.call}, {fault.what}.')

    self._processes = process_group_lib.Processes(
      *(make, self._sizes, step_timeout, idle_timeout), say, tell
    )
    self.spec, self._memory = self._processes.spec, self._processes.memory
    self._episodes = self._processes.episodes
    self._reel = self._processes.reel
    self._failures = np.zeros(n, int)  # In a row.

  def __len__(self):
    return self._sizes[0]

  def __repr__(self):
    n, chunk, processes = self._sizes
    return f'Pool({self._make}, {n}, {processes}, chunk={chunk})'

  @property
  def pids(self) -> list[int]:
    """Of the worker processes that are there."""
    return self._processes.pids

  @property
  def episode(self) -> tuple[int, int, int]:
    """Shape [K, C, A] of the actions of the longest episode."""
    return self._episodes.longest, *self._memory.action_NCA.shape[1:]

  def close(self):
    """Ends all processes."""
    self._processes.close()

  def init(self, seed_B, *, rows: int = 0, every: int = 1):
    """Begins episodes by seeds, whatever was under way.

    Args:
      seed_B: of the first environments, in [0, 2³¹).
      rows: in how many of them the first episode is filmed.
      every: calls between pictures.

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
    self._processes.refuse_busy(row_B)
    self._reel.roll(seed_B, rows, every)
    self._restart(row_B, 0 * row_B, seed_B)
    token = np.stack([row_B, 0 * row_B, seed_B], 1).astype(np.int32)
    return token, self._seen(self._memory.obs, row_B)

  def frames(self, token, time):
    """What was filmed since, as `stages.base.VideoRecorder` says."""
    row_B, shape = np.asarray(token)[:, INDEX], self.spec.picture.shape
    return self._reel.frames(row_B, np.asarray(time), shape)

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
    self._memory.action_NCA[row_B] = (
      action if action.ndim == 3 else action[:, None]
    )
    for i in row_B:
      self._episodes.remember(i)
    self._reel.aim(row_B, token[:, CALL])
    asked = self._processes.ask('step', row_B)
    token = token.copy()
    token[:, CALL] += 1
    return Ticket(self, row_B, token, asked, [])

  def receive(self, ticket: Ticket):
    """Waits for what `send` began.

    Returns:
      The token to go on with, and the `stages.base.TimeStep`.

    Raises:
      BrokenError: if an environment cannot be brought to begin an episode.
    """
    done = self._processes.hear(ticket.asked)
    ticket.elsewhere.extend(
      (f'simulators {rank}', *when) for rank, when in done.items()
    )
    m, row_B = self._memory, ticket.rows
    reward_BC = m.reward_NC[row_B]
    gamma_C = np.float32(self._discount) ** np.arange(reward_BC.shape[1])
    ended_B, lost_B = m.begun_N[row_B] == m.call_N[row_B], m.lost_N[row_B]
    obs, final = self._seen(m.obs, row_B), self._seen(m.obs, row_B)
    for path, x in simulator.leaves(final).items():
      x[ended_B] = m.final[path][row_B[ended_B]]
    self._count(row_B, lost_B)
    return ticket.token, base.TimeStep(
      obs=obs,
      reward=(reward_BC * gamma_C).sum(1, dtype=np.float32),
      terminated=m.terminated_N[row_B],
      truncated=m.truncated_N[row_B],
      final_obs=final,
      success=m.success_N[row_B],
      steps=m.steps_N[row_B],
      env_failed=lost_B,
    )

  def save(self, token) -> episode_log.Past:
    """What, with a token, is enough to go on in any process."""
    return self._episodes.past(np.asarray(token)[:, INDEX])

  def load(self, token, past: episode_log.Past):
    """Has environments where a token and its past say, and returns the token.

    Those that are elsewhere are brought there by their seeds and actions.
    """
    token = np.asarray(token)
    row_B, call_B, seed_B = token.T.astype(np.int64)
    self._processes.refuse_busy(row_B)
    m = self._memory
    away_B = ~self._processes.known_N[row_B] | (m.base_N[row_B] != seed_B)
    away_B |= m.call_N[row_B] != call_B
    away_B |= episode_log.differ(self._episodes.past(row_B), past)
    if away_B.any():
      self._bring(np.flatnonzero(away_B), row_B, call_B, seed_B, past)
    return token

  def _bring(self, away, row_B, call_B, seed_B, past):
    """Brings rows `away` of a token to where they were."""
    self._processes.start()
    self._processes.known_N[row_B[away]] = True
    self._memory.base_N[row_B[away]] = seed_B[away]
    replays = {}
    for b in away:
      i = int(row_B[b])
      replays[i] = self._episodes.put(i, int(call_B[b]), past, b)
    lost = [i for i, actions in replays.items() if actions is None]
    for i in lost:
      del replays[i]
    self._processes.replay(replays)
    moved = sum(len(actions) > 0 for actions in replays.values())
    if moved:
      self._say(
        f'Episodes that are gone on with, by their seeds and actions: {moved}.'
      )
    if lost:
      self.restarted_episodes += len(lost)
      self._say(f'New episodes, as those could not be saved: {len(lost)}.')

  def _count(self, row_B, lost_B):
    """Counts lost episodes; gives up on what only ever fails."""
    self.failed_episodes += int(lost_B.sum())
    self._failures[row_B] = np.where(lost_B, self._failures[row_B] + 1, 0)
    for i in row_B[self._failures[row_B] >= FAILURES]:
      whats = (x.what for x in reversed(self.faults) if x.env_id == i)
      what = next(whats, 'was in another process')
      raise worker.BrokenError(
        f'Environment {i} failed {FAILURES} times in a row; the last time it '
        f'{what}.'
      )

  def _seen(self, rows, row_B):
    """Copies: memory is written again by the next step."""
    return simulator.tree({path: x[row_B] for path, x in rows.items()})

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
    self._processes.refuse_busy(row_B)  # While they step, `call_N` moves on.
    here_B = self._processes.known_N[row_B] & (
      self._memory.base_N[row_B] == seed_B
    )
    for i, call, here in zip(row_B, call_B, here_B, strict=True):
      at = f'at {self._memory.call_N[i]}' if here else 'of another token here'
      if not here or call != self._memory.call_N[i]:
        raise ValueError(
          f'Environment {i} was to make call {call}, but is {at}: each token '
          'is used once and where it was made. To go on elsewhere, or from an '
          'earlier one, `load` it with what `save` has said of it.'
        )

  def _restart(self, row_B, call_B, seed_B):
    """Begins episodes where tokens say that environments are."""
    self._processes.start()
    m = self._memory
    m.base_N[row_B], m.call_N[row_B] = seed_B, call_B
    m.attempt_N[row_B] = m.dropped_N[row_B] = 0
    for i in row_B:
      self._episodes.forget(i)
    self._processes.hear(self._processes.ask('reset', row_B))
    self._processes.known_N[row_B] = True


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
