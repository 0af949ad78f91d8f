"""Prints a metric of a run's evaluations as a claim's figure.

  python -m experiments.claims.figure eval/accuracy runs/seeds/SEED=*

The first and last value of each run are printed in percent, or as they are with
`--plain`, and the extremes between them with `--range`.
"""

import argparse
import json
import pathlib


def evaluations(folder, metric) -> list[float]:
  """The values of a metric in a run's `metrics.jsonl`, in order."""
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [x[metric] for x in map(json.loads, lines) if metric in x]


def describe(values, extremes=False, plain=False) -> str:
  scale, unit = (1, '') if plain else (100, ' %')
  shown = lambda *some: [f'{scale * value:.3g}' for value in some]
  text = ' → '.join(shown(values[0], values[-1])) + unit
  if extremes:
    low, high = shown(min(values), max(values))
    text += f', from {low} to {high}{unit}'
  return text


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('metric')
  parser.add_argument('runs', nargs='+', type=pathlib.Path)
  parser.add_argument('--range', action='store_true')
  parser.add_argument('--plain', action='store_true')
  args = parser.parse_args()
  found = [
    describe(evaluations(run, args.metric), args.range, args.plain)
    for run in args.runs
  ]
  print('figure: ' + ', '.join(found))


if __name__ == '__main__':
  main()
