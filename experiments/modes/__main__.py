"""Replays the published choices of mode, as a table and a figure.

  python -m experiments.modes

Writes results.json and modes.png beside this file.
"""

import dataclasses
import json
import pathlib

from matplotlib import pyplot as plt
import numpy as np

from experiments.modes import published, replay

HERE = pathlib.Path(__file__).parent
COLORS = {'temporal': 'C0', 'spatial': 'C1', 'hybrid': 'C2'}


def draw(found: list[replay.Replay]):
  """Each mode's speed, temporal being one; a ring where the paper has it."""
  figure, axes = plt.subplots(figsize=(9, 4.2), layout='constrained')
  at = np.arange(len(found))
  for i, (mode, color) in enumerate(COLORS.items()):
    speed = [
      one.seconds['temporal'] / one.seconds.get(mode, np.inf) for one in found
    ]
    axes.bar(at + 0.27 * (i - 1), speed, 0.25, color=color, label=mode)
  for x, one in zip(at, found, strict=True):
    shift = 0.27 * (list(COLORS).index(one.published_fastest) - 1)
    axes.plot(x + shift, 0.06, 'wo', markersize=4)
    if one.speedups[0]:
      other = (
        one.published_fastest
        if one.published_fastest != 'temporal'
        else 'spatial'
      )
      if one.case.endswith('LIBERO'):
        other = 'hybrid'
      shift = 0.27 * (list(COLORS).index(other) - 1)
      axes.plot(
        x + shift, one.speedups[0], 'k_', markersize=9, markeredgewidth=2
      )
  axes.plot([], [], 'k_', markeredgewidth=2, label='published')
  axes.plot([], [], 'o', color='gray', label='was faster, published')
  axes.set_xticks(
    at,
    [f'{one.case.replace("Qwen", "Q")}, {one.devices}' for one in found],
    rotation=60,
    ha='right',
    fontsize=7,
  )
  axes.set_ylim(0, 2)
  axes.set_ylabel('speed, temporal = 1 (modeled)')
  axes.legend(ncols=5, fontsize=7, loc='upper right')
  figure.savefig(HERE / 'modes.png', dpi=110)


def main():
  found = [
    replay.replay(case, devices)
    for case in published.CASES
    for devices in case.devices
  ]
  plain = [dataclasses.asdict(one) | {'agrees': one.agrees} for one in found]
  (HERE / 'results.json').write_text(json.dumps(plain, indent=2) + '\n')
  draw(found)
  print(replay.table(found))
  print(
    '\nWith a loop that decodes every piece until its last row has ended:\n'
  )
  loops = [
    replay.replay(case, devices, engine=False)
    for case in published.CASES
    if case.flow == 'ppo'
    for devices in case.devices
  ]
  print(replay.table(loops))


if __name__ == '__main__':
  main()
