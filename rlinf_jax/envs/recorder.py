"""What a pool has filmed: pictures of the first episodes of an evaluation."""

from collections.abc import Callable

import numpy as np

from rlinf_jax.envs import shared_memory as shared_memory_lib
from rlinf_jax.envs import worker


class Reel:
  """Pictures by environment and by how often that had been stepped.

  It films the episodes of the first seeds that it is asked for, and never
  others: an evaluation in several batches shows its first, each time the same.
  """

  def __init__(
    self, memory: shared_memory_lib.Memory, say: Callable[[str], None]
  ):
    """Starts with nothing; `say` is told, once, why there is nothing."""
    self._memory, self._say, self._blind = memory, say, False
    self._cast: np.ndarray | None = None
    self._every, self._taken = 1, {}

  def roll(self, seed_B, rows: int, every: int):
    """Films the first `rows` environments that begin by seeds, and no other."""
    self._memory.film_N[:] = shared_memory_lib.NO
    self._every, self._taken = every, {i: {} for i in range(rows)}
    seed_K = np.array(seed_B[:rows])
    if rows and self._cast is None:
      self._cast = seed_K
    if not self._blind and np.array_equal(seed_K, self._cast):
      self._memory.film_N[: len(seed_K)] = shared_memory_lib.YES

  def aim(self, row_B, call_B):
    """Says what is filmed of the steps after these calls."""
    m = self._memory
    for i, call in zip(row_B, call_B, strict=True):
      if m.begun_N[i] > 0:  # Its first episode has ended.
        m.film_N[i] = shared_memory_lib.NO
      elif m.film_N[i]:
        due = (call + 1) % self._every == 0
        m.film_N[i] = shared_memory_lib.YES if due else shared_memory_lib.END

  def take(self, picture: worker.Picture):
    """Keeps a picture."""
    if isinstance(picture.frame, str):
      self.stop(picture.frame)
    else:
      self._taken[picture.env_id][picture.call] = picture.frame

  def stop(self, why: str):
    """Films nothing from now on."""
    self._memory.film_N[:] = shared_memory_lib.NO
    if not self._blind:
      self._say(f'There is no video of what is simulated: {why}.')
    self._blind = True

  def frames(self, row_B, time, shape) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of environments, as `stages.base.VideoRecorder` has them."""
    if self._cast is None:
      self.stop(
        'they began in another process than this; give `reset`, `simulate` '
        'and `video` one place'
      )
    frame = np.zeros((*time.shape, *shape), np.uint8)
    shown_B = np.zeros(len(row_B), np.float32)
    for b, (i, times) in enumerate(zip(row_B, time.tolist(), strict=True)):
      taken = self._taken.get(int(i), {})
      if {*times} <= taken.keys():
        frame[b], shown_B[b] = [taken[t] for t in times], 1
    return frame, shown_B
