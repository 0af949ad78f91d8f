"""Environments in worker processes, stepped together and in order.

N environments are spread over P processes, environment i in process i mod P, so
that any run of rows keeps all processes busy: while a policy acts on one half
of the rows, every process steps environments of the other half. A call is one
message per process; observations and actions lie in shared memory.

The state of a row is a token: the environment's number, its call count, and its
seed. Tokens are used in order. With the snapshot that `save` returns, any
process can go on from a token, or this one go back to it: seeds and actions
restore episodes.

An environment that fails loses its own episode and no other. If its process
dies, the other environments of that process are restored by replaying their
seeds and actions, and checked to return the same observations.
"""

import collections
from collections.abc import Callable
import contextlib
from typing import NamedTuple

import numpy as np

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import episode_log, process_group, worker
from rlinf_jax.system import notices
from stages.envs import env as env_lib

MAX_FAILURES = 10  # In a row, after which an environment is given up.
INDEX, CALL, SEED = range(3)  # Columns of a token.


class PendingStep(NamedTuple):
  """Steps under way, as `EnvPool.send` returns them.

  Attributes:
    pool: that runs them.
    rows: environments.
    token: after the steps.
    counts: requests to wait for, by process.
    elsewhere: spans (process, start, end) of the work, once it is done.
  """

  pool: 'EnvPool'
  rows: np.ndarray
  token: np.ndarray
  counts: dict[int, int]
  elsewhere: list[tuple[str, float, float]]

  def result(self):
    """Waits, as `EnvPool.recv`."""
    return self.pool.recv(self)

  def cancel(self):
    """Waits all the same: the environments cannot be stepped before."""
    with contextlib.suppress(worker.BrokenError):
      self.pool.recv(self)


class EnvPool:
  """N environments in P processes, which end with this one.

  Attributes:
    spec: of the environments.
    failures: failures that were recovered from, oldest first, the last 1000.
    failed_episodes: episodes lost to failures.
    restarted_episodes: episodes that were started anew, as they could not be
      restored.
  """

  def __init__(
    self,
    make: simulator.Make,
    num_envs: simulator.PositiveInt,
    num_processes: simulator.PositiveInt = 1,
    *,
    chunk: simulator.PositiveInt = 1,
    discount: float = 1.0,
    step_timeout: float = 60.0,
    idle_timeout: float = 120.0,
    say: Callable[[str], None] = notices.notify,
  ):
    """Starts the first process, for the spec of its environment.

    Args:
      make: builds the environment of an index, in a worker: a function of a
        module, or a `functools.partial` of one.
      num_envs: how many environments.
      num_processes: to spread them over.
      chunk: steps of a call, if actions are chunks. It ends where its episode
        does: a horizon that it does not divide cuts the last one short.
      discount: γ of a chunk's reward, Σₖ γᵏ rₖ over the steps taken.
      step_timeout: seconds after which a step or a reset counts as hanging.
      idle_timeout: seconds without a step after which a worker process exits.
        The next request starts it again. A process that only traces a step
        thereby keeps no idle simulators.
      say: told of every failure that is recovered from.

    Raises:
      UnavailableError: if environments cannot be built here.
      ValueError: for no environment, or `make` of the main program.
    """
    _check_settings(make, num_envs, num_processes, chunk)
    self._make, self._sizes = make, (num_envs, chunk, num_processes)
    self._say, self._discount = say, discount
    self.failures = collections.deque(maxlen=1000)
    self.failed_episodes = self.restarted_episodes = 0
    failures = self.failures  # A closure over `self` would keep the pool alive.

    def on_failure(failure: worker.Failure):
      failures.append(failure)
      say(
        f'Environment {failure.env_id}, at call {failure.call}, '
        f'{failure.message}.'
      )

    self._group = process_group.ProcessGroup(
      make, self._sizes, step_timeout, idle_timeout, say, on_failure
    )
    self.spec, self._memory = self._group.spec, self._group.memory
    self._episodes = self._group.episodes
    self._recorder = self._group.recorder
    self._failures_in_a_row = np.zeros(num_envs, int)

  def __len__(self):
    return self._sizes[0]

  def __repr__(self):
    n, chunk, processes = self._sizes
    return f'EnvPool({self._make}, {n}, {processes}, chunk={chunk})'

  @property
  def horizon(self) -> int:
    """Maximum calls of an episode, each of which makes a chunk of steps."""
    return -(-self.spec.horizon // self._sizes[1])

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers."""
    return self._group.pids

  @property
  def episode_shape(self) -> tuple[int, int, int]:
    """Shape [K, C, A] of the actions of the longest episode."""
    return self._episodes.longest, *self._memory.action_NCA.shape[1:]

  def close(self):
    """Ends all processes."""
    self._group.close()

  def init(self, seed_B, *, rows: int = 0, every: int = 1):
    """Starts episodes by seeds; running ones are dropped.

    Args:
      seed_B: of the first environments, in [0, 2³¹).
      rows: how many of them record their first episode.
      every: calls between frames.

    Returns:
      A token, int32 [B, 3], and observations, a tree of [B, ...].
    """
    seed_B = np.asarray(seed_B, np.int32)
    row_B = np.arange(len(seed_B))
    if len(seed_B) > len(self):
      raise ValueError(
        f'{len(seed_B)} seeds for {len(self)} environments: make the pool as '
        'large as the batch.'
      )
    self._group.check_not_stepping(row_B)
    self._recorder.start(seed_B, rows, every)
    self._reset(row_B, 0 * row_B, seed_B)
    token = np.stack([row_B, 0 * row_B, seed_B], 1).astype(np.int32)
    return token, self._read(self._memory.obs, row_B)

  def frames(self, token, time):
    """Recorded frames, as `video.VideoRecorder.frames`."""
    row_B, shape = np.asarray(token)[:, INDEX], self.spec.image.shape
    return self._recorder.frames(row_B, np.asarray(time), shape)

  def step(self, token, action):
    """Steps environments: `send`, then `recv`."""
    return self.recv(self.send(token, action))

  def send(self, token, action) -> PendingStep:
    """Starts steps of environments, without waiting for them.

    Args:
      token: int32 [B, 3], as `init` or the last call returned it.
      action: [B, A], or chunks [B, C, A].
    """
    token, action = np.asarray(token), np.asarray(action, np.float32)
    self._check(token, action)
    row_B = token[:, INDEX].astype(np.int64)
    self._memory.action_NCA[row_B] = (
      action if action.ndim == 3 else action[:, None]
    )
    for i in row_B:
      self._episodes.append(i)
    self._recorder.before_step(row_B, token[:, CALL])
    counts = self._group.request('step', row_B)
    token = token.copy()
    token[:, CALL] += 1
    return PendingStep(self, row_B, token, counts, [])

  def recv(self, pending: PendingStep):
    """Waits for steps that `send` started.

    Returns:
      The next token, and the `stages.TimeStep`.

    Raises:
      BrokenError: if an environment starts no episode any more.
    """
    spans = self._group.wait(pending.counts)
    pending.elsewhere.extend(
      (f'simulators {rank}', *span) for rank, span in spans.items()
    )
    m, row_B = self._memory, pending.rows
    reward_BC = m.reward_NC[row_B]
    gamma_C = np.float32(self._discount) ** np.arange(reward_BC.shape[1])
    ended_B = m.first_call_N[row_B] == m.call_N[row_B]
    failed_B = m.env_failed_N[row_B]
    obs, final_obs = self._read(m.obs, row_B), self._read(m.obs, row_B)
    for path, x in simulator.leaves(final_obs).items():
      x[ended_B] = m.final[path][row_B[ended_B]]
    self._count_failures(row_B, failed_B)
    return pending.token, env_lib.TimeStep(
      obs=obs,
      reward=(reward_BC * gamma_C).sum(1, dtype=np.float32),
      terminated=m.terminated_N[row_B],
      truncated=m.truncated_N[row_B],
      final_obs=final_obs,
      success=m.success_N[row_B],
      steps=m.steps_N[row_B],
      env_failed=failed_B,
      action_reward=reward_BC,
      chunk_success=m.chunk_success_N[row_B],
    )

  def save(self, token) -> episode_log.Snapshot:
    """A snapshot: with the token, all that any process needs to go on."""
    return self._episodes.snapshot(np.asarray(token)[:, INDEX])

  def load(self, token, snapshot: episode_log.Snapshot):
    """Brings environments to a token and its snapshot; returns the token.

    Environments in another state are restored by their seeds and actions.
    """
    token = np.asarray(token)
    row_B, call_B, seed_B = token.T.astype(np.int64)
    self._group.check_not_stepping(row_B)
    m = self._memory
    differs_B = ~self._group.initialized_N[row_B]
    differs_B |= m.env_seed_N[row_B] != seed_B
    differs_B |= m.call_N[row_B] != call_B
    differs_B |= episode_log.differ(self._episodes.snapshot(row_B), snapshot)
    if differs_B.any():
      at = np.flatnonzero(differs_B)
      self._restore(at, row_B, call_B, seed_B, snapshot)
    return token

  def _restore(self, at, row_B, call_B, seed_B, snapshot):
    """Restores rows `at` of a token."""
    self._group.start()
    self._group.initialized_N[row_B[at]] = True
    self._memory.env_seed_N[row_B[at]] = seed_B[at]
    actions = {
      int(row_B[b]): self._episodes.restore(
        int(row_B[b]), int(call_B[b]), snapshot, b
      )
      for b in at
    }
    lost = [i for i, x in actions.items() if x is None]
    for i in lost:
      del actions[i]
    self._group.replay(actions)
    moved = sum(len(x) > 0 for x in actions.values())
    if moved:
      self._say(f'Episodes restored by their seeds and actions: {moved}.')
    if lost:
      self.restarted_episodes += len(lost)
      self._say(f'Episodes started anew, as they were not saved: {len(lost)}.')

  def _count_failures(self, row_B, failed_B):
    """Counts failed episodes; raises for environments that only fail."""
    self.failed_episodes += int(failed_B.sum())
    in_a_row_N = self._failures_in_a_row
    in_a_row_N[row_B] = np.where(failed_B, in_a_row_N[row_B] + 1, 0)
    for i in row_B[in_a_row_N[row_B] >= MAX_FAILURES]:
      messages = (x.message for x in reversed(self.failures) if x.env_id == i)
      message = next(messages, 'was in another process')
      raise worker.BrokenError(
        f'Environment {i} failed {MAX_FAILURES} times in a row; the last time '
        f'it {message}.'
      )

  def _read(self, rows, row_B):
    """Observations, copied: the next step overwrites the memory."""
    return simulator.tree({path: x[row_B] for path, x in rows.items()})

  def _check(self, token, action):
    """Raises ValueError for a wrong token, or a wrong shape of actions."""
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
    self._group.check_not_stepping(row_B)  # While they step, `call_N` moves on.
    here_B = self._group.initialized_N[row_B] & (
      self._memory.env_seed_N[row_B] == seed_B
    )
    for i, call, here in zip(row_B, call_B, here_B, strict=True):
      at = f'at {self._memory.call_N[i]}' if here else 'of another token here'
      if not here or call != self._memory.call_N[i]:
        raise ValueError(
          f'Environment {i} was to make call {call}, but is {at}: a token can '
          'be used once, in the process that returned it. To go on elsewhere, '
          'or from an earlier token, `load` it with its `save`d snapshot.'
        )

  def _reset(self, row_B, call_B, seed_B):
    """Starts episodes at the given call counts."""
    self._group.start()
    m = self._memory
    m.env_seed_N[row_B], m.call_N[row_B] = seed_B, call_B
    m.attempt_N[row_B] = m.abandoned_N[row_B] = 0
    for i in row_B:
      self._episodes.clear(i)
    self._group.wait(self._group.request('reset', row_B))
    self._group.initialized_N[row_B] = True


def _check_settings(make, num_envs: int, num_processes: int, chunk: int):
  """Raises ValueError for settings that make no pool."""
  if not 1 <= num_processes <= num_envs or chunk < 1:
    raise ValueError(
      f'{num_envs} environments in {num_processes} processes, {chunk} steps a '
      'call: there must be at least one of each, and no process without an '
      'environment.'
    )
  if getattr(make, 'func', make).__module__ == '__main__':
    raise ValueError(
      'The function that builds environments is called in other processes, '
      'which cannot see the main program: put it in a module of its own.'
    )
