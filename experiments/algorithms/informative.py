"""Seconds for each group of completions that GRPO and DAPO learn from.

python -m experiments.algorithms.informative runs/algorithms

A group whose completions are all right or all wrong has no advantages, and
teaches nothing. DAPO draws other groups instead, which costs time. The command
fails if DAPO has learned from a group that teaches nothing.
"""

import pathlib
import sys

from experiments.algorithms import algorithms, table
from rlinf_jax.run_files import run_folder

GROUPS = {'GRPO': 56, 'DAPO': 64}  # In a batch; of DAPO, in a round, too.
HEADER = (
  '| algorithm | groups drawn | learned from | of them informative | '
  'CPU-seconds for each of these | seconds for each | at the end |\n'
  '|---|---|---|---|---|---|---|'
)


def drawn(series: dict[str, run_folder.Series], groups: int) -> float:
  """Groups that a whole run has drawn, with `groups` groups a batch."""
  if 'rollout/rounds' in series:
    return groups * float(series['rollout/rounds'].value.sum())
  return groups * len(series['rollout/groups_degenerate'].value)


def informative(series: dict[str, run_folder.Series], groups: int) -> float:
  """Groups of unequal rewards that a whole run has learned from."""
  if 'rollout/groups_filled' in series:
    share = series['rollout/groups_filled'].value
  else:
    share = 1 - series['rollout/groups_degenerate'].value
  return groups * float(share.sum())


def check(name: str, series: dict[str, run_folder.Series]):
  """Refuses a run of DAPO that has learned from groups of equal rewards.

  Raises:
    SystemExit: naming the first step that did, and their share of its groups;
      or that the run does not say it, as those of older versions.
  """
  if 'rollout/groups_filled' not in series:
    return  # GRPO learns from all groups.
  degenerate = series.get('rollout/groups_degenerate')
  if degenerate is None:
    raise SystemExit(
      f'{name} was run by a version that did not write '
      'rollout/groups_degenerate: run it again, in another folder.'
    )
  for step, share in zip(degenerate.step, degenerate.value, strict=True):
    if share > 0:
      raise SystemExit(
        f'{name} learned in step {step} from groups whose rewards are all '
        f'equal: {share:.1%} of those in its batch, where none is expected. '
        'See how `stages.workflows.dapo` accepts groups.'
      )


def main(output: str):
  print(HEADER)
  finished = table.read(pathlib.Path(output))
  for name, groups in GROUPS.items():
    for run in finished[name]:
      check(name, run.series)
      found = informative(run.series, groups)
      taken = groups * algorithms.STEPS
      of_run = table.summary(name, [run])
      (spent,), (end,) = of_run['cpu_seconds'], of_run['end']
      (elapsed,) = of_run['wall_seconds']
      print(
        f'| {name} | {drawn(run.series, groups):,.0f} | {taken:,} | '
        f'{found:,.0f} ({found / taken:.0%}) | {spent / found:.3f} | '
        f'{elapsed / found:.3f} | {end:.1%} |'
      )


if __name__ == '__main__':
  main(sys.argv[1])
