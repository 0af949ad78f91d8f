"""The actions of episodes under way, by which they can be brought back."""

import collections

import numpy as np

from rlinf_jax.worlds import memory as memory_lib

LONGEST = 10_000  # Calls of an episode that are kept.


class Episodes:
  """What each environment did since its episode began."""

  def __init__(self, memory: memory_lib.Memory):
    """Starts with nothing done."""
    self._memory = memory
    N = len(memory.call_N)
    # The call of the oldest action that is kept, and all since.
    self._kept = [(0, collections.deque()) for _ in range(N)]

  def forget(self, i: int):
    """Begins anew."""
    self._kept[i][1].clear()

  def remember(self, i: int):
    """Keeps the action in memory, and none of an episode that is over."""
    m = self._memory
    first, kept = self._kept[i]
    while kept and (first < m.begun_N[i] or len(kept) == LONGEST):
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
