"""Memory that a pool shares with its workers.

It is a file without a name (`memfd_create`), which workers inherit: it vanishes
with the last process that holds it, however that ends. A name in /dev/shm would
outlive a pool that is killed, and containers keep that small.
"""

import math
import mmap
import os

import numpy as np

from rlinf_jax.envs import simulator

LINE = 64  # Bytes; no two arrays share a cache line.
# A worker's activity.
IDLE, STEPPING, RESETTING, BUILDING, RENDERING = range(5)
ACTIVITIES = ('idle', 'stepping', 'resetting', 'being built', 'rendering')
# Whether an environment is rendered after a step; END: at an episode's end.
NO, YES, END = range(3)


class Memory:
  """Arrays of N environments in P processes.

  Attributes:
    action_NCA: next actions; the C of a chunk are taken in turn.
    obs: current observations, a dict by path of arrays [N, ...].
    final: likewise, the final observation of the episode that ended last.
    reward_NC: of each step.
    terminated_N, truncated_N, success_N: of the last step taken of the chunk.
    chunk_success_N: 1 where any step of the chunk succeeded.
    env_failed_N: 1 where the simulator failed instead of stepping.
    steps_N: steps of the chunk that were taken.
    call_N: call counts; written when all else is.
    env_seed_N: seeds of environments.
    episode_seed_N: seeds of the running episodes.
    first_call_N: call counts at the beginning of the running episodes.
    attempt_N: failed attempts to start the next episode.
    abandoned_N: 1 where the running episode is given up at the next step.
    record_N: whether the environment is rendered next.
    env_P: the environment that a worker is working on.
    activity_P: what it is doing with it.
    heartbeat_P: incremented with every step of every environment.
  """

  def __init__(self, fd: int, spec: simulator.Spec, N: int, C: int, P: int):
    """Maps the file `fd`, and makes it as large as needed."""
    (A,) = spec.low.shape
    results = (
      'terminated',
      'truncated',
      'success',
      'chunk_success',
      'env_failed',
      'steps',
    )
    counters = (
      'call',
      'env_seed',
      'episode_seed',
      'first_call',
      'attempt',
      'abandoned',
      'record',
    )
    obs = simulator.leaves(spec.obs)
    fields = {
      'action_NCA': ((N, C, A), 'f4'),
      'reward_NC': ((N, C), 'f4'),
      **{f'{name}_N': ((N,), 'f4') for name in results},
      **{f'{name}_N': ((N,), 'i8') for name in counters},
      **{
        f'{name}_P': ((P,), 'i8') for name in ('env', 'activity', 'heartbeat')
      },
      **{
        (kind, path): ((N, *array.shape), array.dtype)
        for kind in ('obs', 'final')
        for path, array in obs.items()
      },
    }
    offsets, size = {}, 0
    for name, (shape, dtype) in fields.items():
      offsets[name] = size
      size += math.prod(shape) * np.dtype(dtype).itemsize
      size += -size % LINE
    if os.fstat(fd).st_size < size:
      os.ftruncate(fd, size)
    self._map = mmap.mmap(fd, size)
    arrays = {
      name: np.ndarray(shape, dtype, self._map, offsets[name])
      for name, (shape, dtype) in fields.items()
    }
    self.obs = {path: arrays.pop(('obs', path)) for path in obs}
    self.final = {path: arrays.pop(('final', path)) for path in obs}
    vars(self).update(arrays)


def anonymous() -> int:
  """A file descriptor of memory without a name."""
  return os.memfd_create('rlinf_jax')
