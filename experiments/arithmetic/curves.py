"""Plots held-out accuracy of the seeds and the control, and prints a table.

python -m experiments.arithmetic.curves runs/seeds runs/control OUTPUT
"""

import json
import pathlib
import sys

from matplotlib import pyplot as plt

from rlinf_jax.run_files import run_folder


def row(name: str, run: run_folder.Run) -> dict:
  """The row of a run in the table."""
  accuracy = run.series['eval/accuracy']
  return {
    'run': name,
    'warm start': float(accuracy.value[0]),
    'best': float(accuracy.value.max()),
    'end': float(accuracy.value[-1]),
    'warm-up minutes': run_folder.seconds(run.warm_start) / 60,
    'GRPO minutes': run_folder.seconds(run) / 60,
  }


def main(seeds: str, control: str, output: str):
  runs = {
    path.name: run_folder.read(path)
    for path in sorted(pathlib.Path(seeds).glob('SEED=*'))
  }
  runs['control: rewards shuffled'] = run_folder.read(control)
  figure, axes = plt.subplots(figsize=(7, 4), layout='constrained')
  for name, run in runs.items():
    accuracy = run.series['eval/accuracy']
    style = '--' if 'control' in name else '-'
    axes.plot(accuracy.step, 100 * accuracy.value, style, label=name)
  axes.axhline(90, color='gray', linewidth=0.8)
  axes.set(
    xlabel='GRPO updates', ylabel='held-out greedy accuracy, %', ylim=(0, 100)
  )
  axes.legend(loc='lower right')
  folder = pathlib.Path(output)
  figure.savefig(folder / 'curves.png', dpi=120)
  table = [row(name, run) for name, run in runs.items()]
  (folder / 'results.json').write_text(json.dumps(table, indent=2))
  print('| ' + ' | '.join(table[0]) + ' |')
  print('|' + '---|' * len(table[0]))
  for name, *numbers in (entry.values() for entry in table):
    percents = [f'{100 * x:.1f} %' for x in numbers[:3]]
    minutes = [f'{x:.1f}' for x in numbers[3:]]
    print('| ' + ' | '.join([name, *percents, *minutes]) + ' |')


if __name__ == '__main__':
  main(*sys.argv[1:])
