"""Curves of a metric of evaluations, of several runs.

  python -m experiments.agents.curves eval/accuracy curves.png \
    'by states=runs/state' 'whole walk=runs/whole'

Runs with the same name have the same color.
"""

import argparse
import json
import pathlib


def read(folder: str, metric: str) -> tuple[list[int], list[float]]:
  """Steps and values of a metric, from a run's `metrics.jsonl`."""
  lines = (pathlib.Path(folder) / 'metrics.jsonl').read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if metric in row]
  return [row['step'] for row in rows], [row[metric] for row in rows]


def draw(metric: str, runs: list[tuple[str, str]], path: str):
  """Draws a curve for each pair of a name and a run folder."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  names = list(dict.fromkeys(name for name, _ in runs))
  figure, axes = pyplot.subplots(figsize=(6, 3.2), layout='constrained')
  for i, (name, folder) in enumerate(runs):
    is_first = name not in [other for other, _ in runs[:i]]
    axes.plot(
      *read(folder, metric),
      color=f'C{names.index(name)}',
      label=name if is_first else None,
    )
  axes.set(xlabel='step', ylabel=metric, ylim=(0, 1))
  axes.legend(frameon=False)
  figure.savefig(path, dpi=120)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('metric')
  parser.add_argument('picture', help='File to write.')
  parser.add_argument('runs', nargs='+', metavar='NAME=FOLDER')
  args = parser.parse_args()
  wrong = [run for run in args.runs if '=' not in run]
  if wrong:
    parser.error(f'{wrong[0]!r} is no NAME=FOLDER.')
  runs = [tuple(run.split('=', 1)) for run in args.runs]
  draw(args.metric, runs, args.picture)


if __name__ == '__main__':
  main()
