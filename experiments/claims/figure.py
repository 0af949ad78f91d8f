"""Prints a metric of a run's evaluations as a claim's figure, in percent.

  python -m experiments.claims.figure eval/accuracy runs/seeds/SEED=*

The first and last value of each run are printed, and the extremes between them
with `--range`.
"""

import argparse
import json
import pathlib


def evaluations(folder, metric) -> list[float]:
  """The values of a metric in a run's `metrics.jsonl`, in order."""
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [x[metric] for x in map(json.loads, lines) if metric in x]


def describe(values, extremes=False) -> str:
  percent = [f'{100 * value:.3g}' for value in (values[0], values[-1])]
  text = ' → '.join(percent) + ' %'
  if extremes:
    text += f', from {100 * min(values):.3g} to {100 * max(values):.3g} %'
  return text


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('metric')
  parser.add_argument('runs', nargs='+', type=pathlib.Path)
  parser.add_argument('--range', action='store_true')
  args = parser.parse_args()
  found = [
    describe(evaluations(run, args.metric), args.range) for run in args.runs
  ]
  print('figure: ' + ', '.join(found))


if __name__ == '__main__':
  main()
