"""CPU-seconds for each group of completions that GRPO and DAPO learn from.

python -m experiments.algorithms.informative runs/algorithms

A group whose completions are all right or all wrong has no advantages, and
teaches nothing. DAPO draws other groups instead, which costs time.
"""

import json
import pathlib
import sys

from experiments.algorithms import algorithms
from rlinf_jax.run.folder import run_folder

GROUPS = {'GRPO': 56, 'DAPO': 64}  # That a step learns from.


def informative(series: dict[str, run_folder.Series], groups: int) -> float:
  """Groups with unequal rewards in a whole run of `groups` groups a step."""
  if 'rollout/groups_filled' in series:
    share = series['rollout/groups_filled'].value
  else:
    share = 1 - series['rollout/groups_degenerate'].value
  return groups * float(share.sum())


def main(output: str):
  print('| algorithm | groups | of them informative | CPU-seconds for each |')
  print('|---|---|---|---|')
  for name, groups in GROUPS.items():
    for folder in sorted((pathlib.Path(output) / name).glob('SEED=*')):
      found = informative(run_folder.read(folder).series, groups)
      cost = json.loads((folder / 'cost.json').read_text())['cpu_seconds']
      share = found / (groups * algorithms.STEPS)
      each = cost / found
      print(
        f'| {name} | {groups * algorithms.STEPS} | {share:.0%} | {each:.3f} |'
      )


if __name__ == '__main__':
  main(sys.argv[1])
