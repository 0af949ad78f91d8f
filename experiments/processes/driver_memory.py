"""Peak memory of the driver of a run with Ray, and of its places.

A learner and an actor in processes: the learner holds parameters and two
moments, the actor a copy of the parameters. The state is made, a step is run, a
checkpoint written, and the state read from it. With `--auto`, the stages are
measured and a plan is searched for instead, as plan 'auto' does.
"""

import argparse
import functools
import json
import os
import pathlib
import tempfile
import threading
import time

import numpy as np
import psutil

from experiments.processes import two_places
from planner.ir import plan as plan_lib
from rlinf_jax.planning import autoplan
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.ray import launch
from rlinf_jax.state import state_readers


class Peak:
  """Measures the largest memory of processes, without pages that they share."""

  def __init__(self, processes: dict[str, psutil.Process]):
    self.now = dict.fromkeys(processes, 0)
    self._processes, self._done = processes, threading.Event()
    self._thread = threading.Thread(target=self._watch)

  def _watch(self):
    while not self._done.wait(0.005):
      for name, process in self._processes.items():
        self.now[name] = max(self.now[name], own(process))

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._done.set()
    self._thread.join()


def own(process: psutil.Process) -> int:
  """Resident bytes of a process that it shares with no other."""
  info = process.memory_info()
  return info.rss - info.shared


def measure(size: int) -> dict[str, float]:
  """Runs all parts; returns MiB, and seconds of each.

  Args:
    size: bytes of the state.
  """
  from rlinf_jax.runtime.ray import driver

  initial = two_places.Initial(size // two_places.BYTES // two_places.LEAVES)
  flows, seconds = two_places.Flows(initial), {}
  step, _ = flows()
  plan = plan_lib.parse(two_places.PLAN, dict.fromkeys(step.stages))
  runtime = driver.RayRuntime(plan, flows, step=step)
  processes = {
    name: psutil.Process(about['pid'])
    for name, about in runtime.processes().items()
  }
  processes['driver'] = psutil.Process()
  before = {name: own(process) for name, process in processes.items()}

  def timed(name, call):
    start = time.perf_counter()
    result = call()
    seconds[f'{name}_seconds'] = round(time.perf_counter() - start, 2)
    return result

  with tempfile.TemporaryDirectory() as folder, Peak(processes) as peak:
    files = checkpoint.Checkpoints(pathlib.Path(folder), 1)
    source = {'at': np.zeros(1)}
    first = state_readers.FirstState(initial)
    timed('start', lambda: runtime.start(first))
    runtime.step(np.ones(4, np.float32), two_places.KEY)

    def save():
      files.save(1, runtime, source, {})
      files.wait()

    timed('save', save)
    shapes = programs.state_shapes(step)
    saved = files.load(shapes, first, source).state
    timed('restore', lambda: runtime.start(saved, 1))
    files.close()
  runtime.close()
  mebibytes = {
    f'{name}_mib': round((peak.now[name] - before[name]) / 2**20)
    for name in processes
  }
  return {'state_mib': round(size / 2**20)} | mebibytes | seconds


def measure_planning(size: int) -> dict[str, float]:
  """Measures stages and searches for a plan; returns MiB, and seconds.

  Args:
    size: bytes of the state.
  """
  from rlinf_jax.planning.profiling import profiler

  initial = two_places.Initial(size // two_places.BYTES // two_places.LEAVES)
  flows = two_places.Flows(initial)
  step, _ = flows()
  measured = functools.partial(
    profiler.measure,
    flows,
    state=state_readers.FirstState(initial),
    inputs=[np.ones(4, np.float32), two_places.KEY],
  )
  processes = {'driver': psutil.Process()}
  before, start = own(processes['driver']), time.perf_counter()
  with (
    tempfile.TemporaryDirectory() as folder,
    Peak(processes) as peak,
  ):
    os.environ['RLINF_JAX_CACHE'] = folder  # Nothing was measured before.
    chosen = autoplan.find_plan((step, step), 0, measured)
  constants = chosen.model.measured.constants
  return {
    'state_mib': round(size / 2**20),
    'driver_mib': round((peak.now['driver'] - before) / 2**20),
    'plan_seconds': round(time.perf_counter() - start, 2),
    'learn_seconds': round(constants['learn', 1, ()], 3),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--mebibytes', type=int, default=500)
  parser.add_argument('--auto', action='store_true')
  arguments = parser.parse_args()
  launch.connect('local')
  run = measure_planning if arguments.auto else measure
  print(json.dumps(run(arguments.mebibytes * 2**20)))


if __name__ == '__main__':
  main()
