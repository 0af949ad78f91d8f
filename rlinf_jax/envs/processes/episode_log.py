"""Actions of running episodes, from which environments can be restored."""

import collections
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import shared_memory as shared_memory_lib

LONGEST = 10_000  # Calls of an episode that are kept at most.
NEVER = -1  # As `first_call`: the episode cannot be restored.


class Snapshot(NamedTuple):
  """Seeds and actions, from which any process can restore environments.

  A simulator's own state is not enough: ManiSkill, for one, steps from more
  than what it calls its state, and an episode restored from that diverges.

  Attributes:
    seed: seeds of the running episodes, int32 [B].
    first_call: call counts at their beginning, int32 [B], or `NEVER`.
    action: actions since then, [B, K, C, A], padded with zeros.
    obs: the last observations, a tree of [B, ...].
  """

  seed: Any
  first_call: Any
  action: Any
  obs: Any


class EpisodeLog:
  """The actions of each environment's running episode."""

  def __init__(self, memory: shared_memory_lib.Memory, horizon: int):
    """Starts empty; `horizon` is the maximum length of an episode."""
    self._memory = memory
    N, C, _ = memory.action_NCA.shape
    self.longest = min(-(-horizon // C), LONGEST)
    # The call of the oldest action that is kept, and all actions since.
    self._kept = [(0, collections.deque()) for _ in range(N)]

  def clear(self, i: int):
    """Forgets the actions of environment `i`."""
    self._kept[i][1].clear()

  def append(self, i: int):
    """Adds the action in memory; drops those of an episode that is over."""
    m = self._memory
    first, kept = self._kept[i]
    while kept and (first < m.first_call_N[i] or len(kept) == self.longest):
      kept.popleft()
      first += 1
    if not kept:
      first = int(m.call_N[i])
    kept.append(m.action_NCA[i].copy())
    self._kept[i] = first, kept

  def actions(self, i: int) -> np.ndarray | None:
    """Chunks [n, C, A] of the running episode; None if not all are kept."""
    m = self._memory
    (first, kept), start, call = self._kept[i], m.first_call_N[i], m.call_N[i]
    if start == call:
      return m.action_NCA[i][None][:0]
    if not first <= start < call <= first + len(kept):
      return None
    return np.stack([*kept][start - first : call - first])

  def snapshot(self, row_B) -> Snapshot:
    """The snapshot of some environments."""
    m, B = self._memory, len(row_B)
    first_call_B = m.first_call_N[row_B].astype(np.int32)
    action = np.zeros((B, self.longest, *m.action_NCA.shape[1:]), np.float32)
    for b, i in enumerate(row_B):
      actions = None if m.abandoned_N[i] else self.actions(i)
      if actions is None:
        first_call_B[b] = NEVER
      else:
        action[b, : len(actions)] = actions
    obs = {path: x[row_B] for path, x in m.obs.items()}
    return Snapshot(
      m.episode_seed_N[row_B].astype(np.int32),
      first_call_B,
      action,
      simulator.tree(obs),
    )

  def restore(
    self, i: int, call: int, snapshot: Snapshot, b: int
  ) -> np.ndarray | None:
    """Sets environment `i` to row `b` of a snapshot taken before a call.

    Returns:
      The actions [n, C, A] to replay, or None if the episode is lost.
    """
    m, start = self._memory, int(snapshot.first_call[b])
    m.call_N[i], m.episode_seed_N[i] = call, snapshot.seed[b]
    m.first_call_N[i] = call if start == NEVER else start
    m.attempt_N[i], m.abandoned_N[i] = 0, start == NEVER
    for path, x in simulator.leaves(snapshot.obs).items():
      m.obs[path][i] = x[b]
    if start == NEVER:
      self.clear(i)
      return None
    actions = np.asarray(snapshot.action[b, : call - start])
    self._kept[i] = start, collections.deque(actions)
    return actions


def differ(one: Snapshot, other: Snapshot) -> np.ndarray:
  """Rows in which two snapshots differ, bool [B]."""
  different_B = np.zeros(len(one.first_call), bool)
  # By name: JAX returns the names of a dict in another order.
  seen, found = simulator.leaves(one.obs), simulator.leaves(other.obs)
  pairs = zip(
    (*one[:3], *seen.values()),
    (*other[:3], *(found[path] for path in seen)),
    strict=True,
  )
  for x, y in pairs:
    different_B |= (np.asarray(x) != y).reshape(len(x), -1).any(1)
  return different_B
