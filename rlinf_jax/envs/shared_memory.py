"""Memory that a pool shares with its workers.

It is a file without a name (`memfd_create`), which workers inherit: when the
last process that holds it ends, however it ends, nothing is left. A name in
/dev/shm would outlive a pool that is killed, and containers keep that small.
"""

import math
import mmap
import os

import numpy as np

from rlinf_jax.envs import simulator

LINE = 64  # Bytes; no two arrays share a cache line.
# What a worker is at.
IDLE, STEPPING, BEGINNING, BUILDING, DRAWING = range(5)
DOES = ('idle', 'stepping', 'beginning an episode', 'being built', 'drawn')
NO, YES, END = range(3)  # What is filmed: the next moment only if it is an end.


class Memory:
  """Arrays of N environments in P processes, all named.

  Attributes:
    action_NCA: what to do next, of which a chunk's C steps are done in turn.
    obs: a dict by path of arrays [N, ...]: what is seen now.
    final: likewise, of the episode that ended last: what was seen at its end.
    reward_NC: of each step.
    terminated_N, truncated_N, success_N: of any step of the chunk.
    lost_N: one where the simulator failed, instead of making a step.
    steps_N: how many steps of the chunk were made.
    call_N: how often each was stepped; written when all else is.
    base_N: seeds of environments.
    seed_N: seeds of the episodes under way.
    begun_N: calls before the episode under way.
    attempt_N: episodes that failed to begin since.
    dropped_N: one where the episode under way is to be given up.
    film_N: whether a picture is taken of what comes next.
    at_P: the environment that a worker is at.
    does_P: what it does with it.
    beat_P: grows with every environment's every step.
  """

  def __init__(self, fd: int, spec: simulator.Spec, N: int, C: int, P: int):
    """Maps what is in `fd`, which is made as large as it must be."""
    (A,) = spec.low.shape
    came = ('terminated', 'truncated', 'success', 'lost', 'steps')
    numbers = ('call', 'base', 'seed', 'begun', 'attempt', 'dropped', 'film')
    seen = simulator.leaves(spec.obs)
    fields = {
      'action_NCA': ((N, C, A), 'f4'),
      'reward_NC': ((N, C), 'f4'),
      **{f'{name}_N': ((N,), 'f4') for name in came},
      **{f'{name}_N': ((N,), 'i8') for name in numbers},
      **{f'{name}_P': ((P,), 'i8') for name in ('at', 'does', 'beat')},
      **{
        (kind, path): ((N, *like.shape), like.dtype)
        for kind in ('obs', 'final')
        for path, like in seen.items()
      },
    }
    places, size = {}, 0
    for name, (shape, dtype) in fields.items():
      places[name] = size
      size += math.prod(shape) * np.dtype(dtype).itemsize
      size += -size % LINE
    if os.fstat(fd).st_size < size:
      os.ftruncate(fd, size)
    self._map = mmap.mmap(fd, size)
    arrays = {
      name: np.ndarray(shape, dtype, self._map, places[name])
      for name, (shape, dtype) in fields.items()
    }
    self.obs = {path: arrays.pop(('obs', path)) for path in seen}
    self.final = {path: arrays.pop(('final', path)) for path in seen}
    vars(self).update(arrays)


def anonymous() -> int:
  """A file descriptor of memory without a name."""
  return os.memfd_create('rlinf_jax')
