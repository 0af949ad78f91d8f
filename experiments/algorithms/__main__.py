"""Trains one warm start by every algorithm for language models.

  python -m experiments.algorithms runs/algorithms [NAME …] [--seeds 3]

Runs that have finished are not repeated, so a stopped experiment goes on. Then
`python -m experiments.algorithms.table runs/algorithms` makes the table and the
figure.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

from experiments.algorithms import algorithms

SHUFFLED = pathlib.Path('experiments/arithmetic/shuffled.gin')
RECIPES = pathlib.Path('gin_configs')


def command(algorithm: algorithms.Algorithm, folder: pathlib.Path, **macros):
  """The command line of a run in `folder`."""
  files = [
    RECIPES / f'{algorithm.recipe}.gin',
    *(RECIPES / f'{name}.gin' for name in algorithm.variants),
  ]
  bindings = macros | dict(algorithm.bindings)
  if algorithm.shuffled:
    files.append(SHUFFLED)
    bindings[f'workflows.{algorithm.workflow}.verify'] = '@shuffled.rewards()'
  return [
    *(sys.executable, '-m', 'rlinf_jax.main', '--resume'),
    *(f'--gin_file={file}' for file in files),
    *(f'--gin.{name}={value}' for name, value in bindings.items()),
    f'--workdir={folder}',
  ]


def run(line: list[str], folder: pathlib.Path):
  """Runs a command line, unless an earlier call of this has finished it.

  `cost.json` of the folder adds up the seconds of all attempts.

  Raises:
    subprocess.CalledProcessError: if it fails.
  """
  finished, costs = folder / 'result.json', folder / 'cost.json'
  if finished.exists():
    return
  print(f'{folder}: {" ".join(line[1:])}', flush=True)
  folder.mkdir(parents=True, exist_ok=True)
  before, start = _cpu_seconds(), time.monotonic()
  try:
    with (folder / 'console.txt').open('a') as console:
      subprocess.run(line, check=True, stdout=console, stderr=console)
  finally:
    cost = json.loads(costs.read_text()) if costs.exists() else {}
    cpu, wall = _cpu_seconds() - before, time.monotonic() - start
    total = {
      'cpu_seconds': cost.get('cpu_seconds', 0.0) + cpu,
      'wall_seconds': cost.get('wall_seconds', 0.0) + wall,
    }
    costs.write_text(json.dumps(total))


def _cpu_seconds() -> float:
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('output', type=pathlib.Path)
  parser.add_argument('names', nargs='*', help='of algorithms; all if none')
  parser.add_argument('--seeds', type=int, default=3)
  arguments = parser.parse_args()
  known = {algorithm.name: algorithm for algorithm in algorithms.ALL}
  unknown = set(arguments.names) - set(known)
  if unknown:
    parser.error(
      f'There is no algorithm {sorted(unknown)}: name some of {list(known)}.'
    )
  output = arguments.output
  warm = output / 'warm_start_run'
  run(command(algorithms.WARM_START, warm), warm)
  start = warm / 'warm_start' / 'model'
  for seed in range(arguments.seeds):
    for name in arguments.names or known:
      algorithm = known[name]
      if algorithm.shuffled and seed:
        continue  # One control a family.
      macros = {
        'CHECKPOINT': start,
        'SEED': seed,
        'STEPS': algorithms.STEPS,
      }
      if algorithm.recipe == 'distillation_arithmetic':
        macros['TEACHER'] = output / algorithms.TEACHER / 'SEED=0' / 'model'
      folder = output / name / f'SEED={seed}'
      run(command(algorithm, folder, **macros), folder)


if __name__ == '__main__':
  main()
