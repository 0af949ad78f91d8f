"""Seconds of a run's stages beside those of its plan.

  python -m experiments.h100.stages RUN [PLAN_JSON]

RUN is the folder of a run, of which the medians of all steps but the first are
printed, whose stages are compiled. PLAN_JSON is what `--plan_json` wrote.
"""

import json
import pathlib
import statistics
import sys

SHOWN = 1e-3  # Seconds below which a stage is left out.


def measured(folder: pathlib.Path) -> dict[str, float]:
  """Median seconds by stage, and the peak of memory in GiB.

  Raises:
    ValueError: for a run of fewer than two steps.
  """
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  steps = [x for x in map(json.loads, lines) if 'time/step' in x]
  if len(steps) < 2:
    raise ValueError(
      f'{folder} has {len(steps)} steps, and the first one compiles: let it '
      'make some more.'
    )
  names = [n for n in steps[-1] if n.startswith(('time/', 'memory/'))]
  return {
    name: statistics.median(x[name] for x in steps[1:] if name in x)
    for name in names
  }


def modeled(path: pathlib.Path) -> dict[str, float]:
  """The same of a plan with one place."""
  plan = json.loads(path.read_text())
  (busy,), (place,) = plan['busy'].values(), plan['places']
  values = {f'time/{name}': seconds for name, seconds in busy.items()}
  return values | {
    'time/step': plan['seconds'],
    'memory/peak_gib': place['memory']['bytes'] / 2**30,
  }


def main(folder: str, plan: str | None = None):
  """Prints a row for each stage that takes some time."""
  got = measured(pathlib.Path(folder))
  want = modeled(pathlib.Path(plan)) if plan else {}
  print('| | modeled | measured | |\n|---|---|---|---|')
  for name, value in got.items():
    if value < SHOWN:
      continue
    known = name in want and want[name] > 0
    cells = [
      f'`{name}`',
      f'{want[name]:.3f}' if known else '',
      f'{value:.3f}',
      f'{value / want[name]:.2f}' if known else '',
    ]
    print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
  main(*sys.argv[1:])
