"""The actions of episodes under way, by which they can be brought back."""

import collections
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.envs import shared_memory as shared_memory_lib
from rlinf_jax.envs import simulator

LONGEST = 10_000  # Calls of an episode that are kept.
NEVER = -1  # In place of when an episode began: it cannot be brought back.


class Past(NamedTuple):
  """By which any process can bring environments to where they are.

  A simulator's own state would not do: what ManiSkill calls so is not all that
  it goes on from, and an episode that is restored by it soon goes another way.

  Attributes:
    seed: of the episodes under way, int32 [B].
    begun: calls before those, int32 [B], or `NEVER`.
    action: what was done since, [B, K, C, A], with zeros behind.
    obs: what was seen last, a tree of [B, ...].
  """

  seed: Any
  begun: Any
  action: Any
  obs: Any


class Episodes:
  """What each environment did since its episode began."""

  def __init__(self, memory: shared_memory_lib.Memory, horizon: int):
    """Starts with nothing done; `horizon` is the most steps of an episode."""
    self._memory = memory
    N, C, _ = memory.action_NCA.shape
    self.longest = min(-(-horizon // C), LONGEST)
    # The call of the oldest action that is kept, and all since.
    self._kept = [(0, collections.deque()) for _ in range(N)]

  def forget(self, i: int):
    """Begins anew."""
    self._kept[i][1].clear()

  def remember(self, i: int):
    """Keeps the action in memory, and none of an episode that is over."""
    m = self._memory
    first, kept = self._kept[i]
    while kept and (first < m.begun_N[i] or len(kept) == self.longest):
      kept.popleft()
      first += 1
    if not kept:
      first = int(m.call_N[i])
    kept.append(m.action_NCA[i].copy())
    self._kept[i] = first, kept

  def actions(self, i: int) -> np.ndarray | None:
    """Chunks [n, C, A] of the episode under way; None if not all are kept."""
    m = self._memory
    (first, kept), begun, call = self._kept[i], m.begun_N[i], m.call_N[i]
    if begun == call:
      return m.action_NCA[i][None][:0]
    if not first <= begun < call <= first + len(kept):
      return None
    return np.stack([*kept][begun - first : call - first])

  def past(self, row_B) -> Past:
    """That of some environments."""
    m, B = self._memory, len(row_B)
    begun_B = m.begun_N[row_B].astype(np.int32)
    action = np.zeros((B, self.longest, *m.action_NCA.shape[1:]), np.float32)
    for b, i in enumerate(row_B):
      done = None if m.dropped_N[i] else self.actions(i)
      if done is None:
        begun_B[b] = NEVER
      else:
        action[b, : len(done)] = done
    obs = {path: x[row_B] for path, x in m.obs.items()}
    return Past(
      *(m.seed_N[row_B].astype(np.int32), begun_B, action),
      simulator.tree(obs),
    )

  def put(self, i: int, call: int, past: Past, b: int) -> np.ndarray | None:
    """Takes row `b` of a past for that of environment `i`, before a call.

    Returns:
      The actions [n, C, A] that lead there, or None where it is given up.
    """
    m, begun = self._memory, int(past.begun[b])
    m.call_N[i], m.seed_N[i] = call, past.seed[b]
    m.begun_N[i] = call if begun == NEVER else begun
    m.attempt_N[i], m.dropped_N[i] = 0, begun == NEVER
    for path, x in simulator.leaves(past.obs).items():
      m.obs[path][i] = x[b]
    if begun == NEVER:
      self.forget(i)
      return None
    done = np.asarray(past.action[b, : call - begun])
    self._kept[i] = begun, collections.deque(done)
    return done


def differ(one: Past, other: Past) -> np.ndarray:
  """Which rows of two pasts are not the same, bool [B]."""
  different_B = np.zeros(len(one.begun), bool)
  pairs = zip(
    (*one[:3], *simulator.leaves(one.obs).values()),
    (*other[:3], *simulator.leaves(other.obs).values()),
    strict=True,
  )
  for x, y in pairs:
    different_B |= (np.asarray(x) != y).reshape(len(x), -1).any(1)
  return different_B
