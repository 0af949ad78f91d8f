"""Folders of evaluations in training: `evaluations/step_000080`."""

import pathlib
import re
import shutil

SCORES = 'evaluation.json'  # Written last.
COMPLETIONS, SAMPLES = 'completions.jsonl', 'samples.jsonl'


def path(folder: pathlib.Path, step: int) -> pathlib.Path:
  """The folder, in a run folder, of the evaluation after `step` updates."""
  return folder / 'evaluations' / f'step_{step:06}'


def paths(folder: pathlib.Path) -> dict[int, pathlib.Path]:
  """The folders of evaluations of a run, by updates finished, in order."""
  found = {}
  for inside in (folder / 'evaluations').glob('step_*'):
    if match := re.fullmatch(r'step_(\d+)', inside.name):
      found[int(match[1])] = inside
  return dict(sorted(found.items()))


def truncate(folder: pathlib.Path, step: int):
  """Removes the evaluations after `step`, which a resumed run makes again."""
  for later, inside in paths(folder).items():
    if later > step:
      shutil.rmtree(inside)


def keep_completions(folder: pathlib.Path, number: int):
  """Removes completions but those of the newest evaluations; scores stay."""
  found = [*paths(folder).values()]
  for inside in found[: max(0, len(found) - number)]:
    for name in (COMPLETIONS, SAMPLES):
      (inside / name).unlink(missing_ok=True)
