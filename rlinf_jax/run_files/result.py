"""The result of a run: result.json, which marks it as finished."""

import json
import math
import pathlib
from typing import NamedTuple

from rlinf_jax.system import whole_file


class Result(NamedTuple):
  """The outcome of a run.

  Attributes:
    folder: the run folder.
    steps: updates made.
    seconds: of training, evaluations and resumed processes included.
    metrics: the last value of each metric.
  """

  folder: pathlib.Path
  steps: int
  seconds: float
  metrics: dict[str, float]

  def write(self):
    """Writes result.json, atomically; only finite metrics are kept."""
    record = {
      'steps': self.steps,
      'seconds': self.seconds,
      'metrics': {k: v for k, v in self.metrics.items() if math.isfinite(v)},
    }
    path = self.folder / 'result.json'
    whole_file.write_text(path, json.dumps(record, indent=2))


def refuse_existing(folder: pathlib.Path):
  """Raises FileExistsError if a folder holds a run."""
  if any((folder / name).exists() for name in ('config.gin', 'metrics.jsonl')):
    raise FileExistsError(
      f'{folder} already holds a run: add --resume to continue it, or choose '
      'another --workdir.'
    )


def remove(folder: pathlib.Path):
  """Removes the result of a run that goes on with more steps."""
  (folder / 'result.json').unlink(missing_ok=True)


def read_finished(
  folder: pathlib.Path,
  steps: int,
  stop_at_score: float | None,
  *,
  score: str,
  resume: bool,
) -> Result | None:
  """Reads the result of a run that needs no more steps; None if it does.

  Args:
    folder: the run folder.
    steps: steps of the whole run.
    stop_at_score: score at which the run ends early.
    score: the metric that is the score.
    resume: whether a run in `folder` may go on.

  Raises:
    FileExistsError: if `folder` holds a run and `resume` is False.
  """
  if not resume:
    refuse_existing(folder)
  if not (folder / 'result.json').exists():
    return None
  record = json.loads((folder / 'result.json').read_text())
  reached = (
    stop_at_score is not None
    and record['metrics'].get(score, -math.inf) >= stop_at_score
  )
  if record['steps'] < steps and not reached:
    return None
  print(
    f'{folder} is finished: {record["steps"]} steps. See {folder}/report.html.'
  )
  return Result(folder, record['steps'], record['seconds'], record['metrics'])
