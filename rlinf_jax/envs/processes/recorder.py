"""Recorded frames of a pool: the first episodes of an evaluation."""

from collections.abc import Callable

import numpy as np

from rlinf_jax.envs.processes import shared_memory as shared_memory_lib
from rlinf_jax.envs.processes import worker


class Recorder:
  """Frames by environment and call count.

  It records the episodes of the first seeds that it is given, and never others:
  an evaluation in several batches shows its first, each time the same.
  """

  def __init__(
    self, memory: shared_memory_lib.Memory, say: Callable[[str], None]
  ):
    """Starts without frames; `say` is told, once, why there is no video."""
    self._memory, self._say, self._disabled = memory, say, False
    self._seeds: np.ndarray | None = None  # Of the recorded episodes.
    self._every, self._frames = 1, {}

  def start(self, seed_B, rows: int, every: int):
    """Records the first `rows` environments that start by these seeds."""
    self._memory.record_N[:] = shared_memory_lib.NO
    self._every, self._frames = every, {i: {} for i in range(rows)}
    seed_K = np.array(seed_B[:rows])
    if rows and self._seeds is None:
      self._seeds = seed_K
    if not self._disabled and np.array_equal(seed_K, self._seeds):
      self._memory.record_N[: len(seed_K)] = shared_memory_lib.YES

  def before_step(self, row_B, call_B):
    """Sets which environments render after the step of these calls."""
    m = self._memory
    for i, call in zip(row_B, call_B, strict=True):
      if m.first_call_N[i] > 0:  # Its first episode has ended.
        m.record_N[i] = shared_memory_lib.NO
      elif m.record_N[i]:
        due = (call + 1) % self._every == 0
        m.record_N[i] = shared_memory_lib.YES if due else shared_memory_lib.END

  def add(self, frame: worker.RenderedFrame):
    """Keeps a frame; stops recording if rendering failed."""
    if isinstance(frame.image, str):
      self.disable(frame.image)
    else:
      self._frames[frame.env_id][frame.call] = frame.image

  def disable(self, why: str):
    """Records nothing from now on."""
    self._memory.record_N[:] = shared_memory_lib.NO
    if not self._disabled:
      self._say(f'There is no video of the simulators: {why}.')
    self._disabled = True

  def frames(self, row_B, time, shape) -> tuple[np.ndarray, np.ndarray]:
    """Frames of environments, as `video.VideoRecorder.frames`."""
    if self._seeds is None:
      self.disable(
        'their episodes began in another process; put the stages `reset`, '
        '`simulate` and `video` on one place'
      )
    frame = np.zeros((*time.shape, *shape), np.uint8)
    shown_B = np.zeros(len(row_B), np.float32)
    for b, (i, times) in enumerate(zip(row_B, time.tolist(), strict=True)):
      frames = self._frames.get(int(i), {})
      if {*times} <= frames.keys():
        frame[b], shown_B[b] = [frames[t] for t in times], 1
    return frame, shown_B
