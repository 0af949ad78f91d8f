"""Makes the table and the figure of the algorithms' runs.

python -m experiments.algorithms.table runs/algorithms experiments/algorithms
"""

import json
import pathlib
import sys

from matplotlib import pyplot as plt
import numpy as np

from experiments.algorithms import algorithms
from rlinf_jax.run_files import run_folder

GOAL = 0.85  # Held-out accuracy that the policy gradients are to reach.
COLUMNS = (
  'algorithm',
  'end, each seed',
  'mean',
  'best',
  'steps to 85 %',
  'CPU-seconds a run',
)


def read(output: pathlib.Path) -> dict[str, list[run_folder.Run]]:
  """The finished runs of each algorithm, by seed.

  A run is finished when it has both its result and its cost: the cost is
  written last, so a run that was stopped between the two is left out.
  """
  return {
    algorithm.name: [
      run_folder.read(folder)
      for folder in sorted((output / algorithm.name).glob('SEED=*'))
      if (folder / 'result.json').exists() and (folder / 'cost.json').exists()
    ]
    for algorithm in algorithms.ALL
  }


def steps_to(accuracy: run_folder.Series, goal: float) -> int | None:
  """The first evaluated step with at least this accuracy; None if never."""
  reached = np.flatnonzero(accuracy.value >= goal)
  return int(accuracy.step[reached[0]]) if len(reached) else None


def summary(name: str, runs: list[run_folder.Run]) -> dict:
  """The row of an algorithm, of its finished runs."""
  accuracies = [run.series['eval/accuracy'] for run in runs]
  costs = [json.loads((run.folder / 'cost.json').read_text()) for run in runs]
  return {
    'algorithm': name,
    'start': float(accuracies[0].value[0]),
    'end': [float(a.value[-1]) for a in accuracies],
    'best': [float(a.value.max()) for a in accuracies],
    'lowest': [float(a.value.min()) for a in accuracies],
    'steps_to_goal': [steps_to(a, GOAL) for a in accuracies],
    'cpu_seconds': [cost['cpu_seconds'] for cost in costs],
    'wall_seconds': [cost['wall_seconds'] for cost in costs],
  }


def line(row: dict) -> str:
  """The row in Markdown."""
  percent = lambda values: ', '.join(f'{100 * x:.1f}' for x in values)
  steps = ', '.join('–' if n is None else str(n) for n in row['steps_to_goal'])
  cells = (
    row['algorithm'],
    percent(row['end']),
    f'{100 * np.mean(row["end"]):.1f}',
    percent(row['best']),
    steps,
    f'{np.median(row["cpu_seconds"]):.0f}',
  )
  return f'| {" | ".join(cells)} |'


def plot(runs: dict[str, list[run_folder.Run]], path: pathlib.Path):
  """Plots every algorithm: the mean of its seeds, and their range."""
  names = [name for name, found in runs.items() if found]
  figure, grid = plt.subplots(
    5, 4, figsize=(11, 11), sharex=True, sharey=True, layout='constrained'
  )
  for axes, name in zip(grid.flat, names, strict=False):
    curves = [run.series['eval/accuracy'] for run in runs[name]]
    values = 100 * np.stack([curve.value for curve in curves])
    step = curves[0].step
    axes.fill_between(step, values.min(0), values.max(0), alpha=0.3)
    axes.plot(step, values.mean(0))
    axes.axhline(100 * GOAL, color='gray', linewidth=0.6)
    axes.set(ylim=(0, 100))
    axes.set_title(name, fontsize='medium')
  for axes in grid.flat[len(names) :]:
    axes.remove()
  figure.supxlabel('steps')
  figure.supylabel('held-out greedy accuracy, %: mean and range of seeds')
  figure.savefig(path, dpi=110)


def main(output: str, target: str):
  runs = read(pathlib.Path(output))
  rows = [summary(name, found) for name, found in runs.items() if found]
  folder = pathlib.Path(target)
  (folder / 'results.json').write_text(json.dumps(rows, indent=2) + '\n')
  plot(runs, folder / 'curves.png')
  print('| ' + ' | '.join(COLUMNS) + ' |')
  print('|' + '---|' * len(COLUMNS))
  for row in rows:
    print(line(row))


if __name__ == '__main__':
  main(*sys.argv[1:])
