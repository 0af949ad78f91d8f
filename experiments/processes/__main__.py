"""The arithmetic run in threads and in processes: equal bits, and overlap.

  python -m experiments.processes runs/arithmetic/warm_start/model

Runs twenty steps on two places, once as threads of one process and once as
processes that Ray starts, in three cases: on policy; with a policy that is one
step old; and on policy with a learner that spans two processes of one device
each. Compares all metrics except those of time, and all arrays of the last
checkpoint, bit by bit.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import jax
import numpy as np

from rlinf_jax.run_files import writers
from rlinf_jax.state import saved_state, state_files

STEPS = 20
OF_TIME = 'time/', 'throughput/', 'utilization/'
RECIPE = 'gin_configs/grpo_arithmetic_ray.gin'
SPAN = {
  'places': {
    'actor': {'devices': [0]},
    'learner': {'devices': [1, 2], 'axes': [['data', 2]], 'processes': 2},
  },
  'stages': {'gradient': 'learner', 'apply': 'learner', '*': 'actor'},
}
# Staleness, and a plan in place of the recipe's.
CASES = {
  'on policy': (0, None),
  'one step old': (1, None),
  'on policy, learner of two processes': (0, SPAN),
}


def run(
  folder: pathlib.Path, checkpoint: str, staleness: int, plan, ray: str | None
):
  """Runs the recipe from the command line, in a new process."""
  bindings = [
    f'STEPS = {STEPS}',
    f'CHECKPOINT = {checkpoint!r}',
    f'workflows.grpo.staleness = {staleness}',
    f'train.train.ray_address = {ray!r}',
    'train.train.evaluate_every = 10',
    f'train.train.checkpoint_every = {STEPS}',
  ]
  bindings += [f'train.train.plan = {plan}'] if plan else []
  command = [sys.executable, '-m', 'rlinf_jax.main', '--gin_file', RECIPE]
  command += [f'--gin_bindings={binding}' for binding in bindings]
  subprocess.run(
    [*command, '--workdir', str(folder)],
    env=os.environ | {'JAX_NUM_CPU_DEVICES': '3'},
    stdout=subprocess.DEVNULL,
    check=True,
  )


def metrics(folder: pathlib.Path) -> list[dict]:
  """All logged metrics except those of time."""
  return [
    {k: v for k, v in line.items() if not k.startswith(OF_TIME)}
    for line in writers.records(folder / 'metrics.jsonl')
  ]


def state(folder: pathlib.Path) -> list[np.ndarray]:
  path = folder / 'checkpoints' / str(STEPS) / saved_state.STATE
  found = state_files.read_all(path)
  return [np.asarray(found[name]) for name in sorted(found)]


def overlap(folder: pathlib.Path) -> float:
  """The fraction of the learner's seconds in which the actor generates."""
  spans = writers.records(folder / 'timeline.jsonl')
  runs = [s for s in spans if s['what'] == 'run' and s['step'] > 2]
  act = [s for s in runs if s['stage'] == 'generate']
  learn = [s for s in runs if s['stage'] == 'gradient']
  both = sum(
    max(0.0, min(a['end'], b['end']) - max(a['start'], b['start']))
    for a in act
    for b in learn
  )
  return both / sum(s['end'] - s['start'] for s in learn)


def seconds(folder: pathlib.Path) -> float:
  """Median seconds of a step."""
  lines = writers.records(folder / 'metrics.jsonl')
  took = [line['time/step'] for line in lines if 'time/step' in line]
  return statistics.median(took[2:])


def compare(checkpoint: str, case: str, folder: pathlib.Path) -> dict:
  """Runs one case in threads and in processes; returns the differences."""
  threads, processes = folder / 'threads', folder / 'processes'
  run(threads, checkpoint, *CASES[case], None)
  run(processes, checkpoint, *CASES[case], 'local')
  pairs = list(zip(state(threads), state(processes), strict=True))
  return {
    'case': case,
    'steps': max(line['step'] for line in metrics(processes)),
    'same_metrics': metrics(threads) == metrics(processes),
    'arrays': len(pairs),
    'same_arrays': sum(x.tobytes() == y.tobytes() for x, y in pairs),
    'overlap': overlap(processes),
    'threads_seconds': seconds(threads),
    'processes_seconds': seconds(processes),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('checkpoint', help='a model from warm start')
  checkpoint = str(pathlib.Path(parser.parse_args().checkpoint).absolute())
  jax.config.update('jax_num_cpu_devices', 3)  # As in the checkpoints.
  for case in CASES:
    with tempfile.TemporaryDirectory() as folder:
      print(json.dumps(compare(checkpoint, case, pathlib.Path(folder))))


if __name__ == '__main__':
  main()
