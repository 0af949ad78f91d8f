"""Simulators without a pool, as a baseline."""

import multiprocessing
import os
import time

from rlinf_jax.envs import maniskill
from rlinf_jax.envs.processes import process as process_lib


class Bare:
  """Processes that loop over environments independently."""

  def __init__(self, task: str, action, processes: int):
    """Starts the processes, and waits until environments are built."""
    context = multiprocessing.get_context('spawn')
    os.environ.update(dict.fromkeys(process_lib.THREADS, '1'))
    self._ends = []
    for rank in range(processes):
      here, there = context.Pipe()
      share = action[:, rank::processes]
      context.Process(target=_loop, args=(there, task, share)).start()
      there.close()
      self._ends.append(here)
    for end in self._ends:
      end.recv()

  def run(self) -> float:
    """Returns the seconds until the last process has finished."""
    begin = time.perf_counter()
    for end in self._ends:
      end.send(True)
    for end in self._ends:
      end.recv()
    return time.perf_counter() - begin


def _loop(end, task, action):
  envs = [maniskill.make(i, task) for i in range(action.shape[1])]
  for i, env in enumerate(envs):
    env.reset(i)
  end.send(True)
  try:
    while end.recv():
      for action_NA in action:
        for env, action_A in zip(envs, action_NA, strict=True):
          result = env.step(action_A)
          if result.terminated or result.truncated:
            env.reset(0)
      end.send(True)
  except EOFError:
    pass
