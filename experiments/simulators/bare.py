"""Simulators without a pool, as a baseline."""

from collections.abc import Callable
import multiprocessing
import os
import time

from rlinf_jax.envs import simulator
from rlinf_jax.envs.processes import process as process_lib


class Bare:
  """Processes that loop over environments independently."""

  def __init__(self, make: Callable, action, processes: int, chunk: int = 1):
    """Starts the processes, and waits until environments are built.

    Args:
      make: `index -> environment`.
      action: of each step and environment.
      processes: to spread the environments over.
      chunk: steps after which an environment is observed.
    """
    context = multiprocessing.get_context('spawn')
    os.environ.update(dict.fromkeys(process_lib.THREADS, '1'))
    self._ends = []
    for rank in range(processes):
      here, there = context.Pipe()
      share = action[:, rank::processes]
      context.Process(target=_loop, args=(there, make, share, chunk)).start()
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


def _loop(end, make, action, chunk):
  envs = [make(i) for i in range(action.shape[1])]
  for i, env in enumerate(envs):
    env.reset(i)
  end.send(True)
  try:
    while end.recv():
      for number, action_NA in enumerate(action, 1):
        for env, action_A in zip(envs, action_NA, strict=True):
          if number % chunk:
            result = simulator.advance(env, action_A)
          else:
            result = env.step(action_A)
          if result.terminated or result.truncated:
            env.reset(0)
      end.send(True)
  except EOFError:
    for env in envs:
      env.close()
