"""Reads run folders, also of runs that crashed or are still running.

A file that is not written yet reads as empty. Records are checked for what
reports read of them, as files may be damaged, or of another program. A long run
has tens of millions of records: one is in memory at a time, and what a report
shows of them.
"""

import array
from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.run_files import evaluations, writers

_TEXTS = {'prompt': str, 'completion': str}
# Fields that records have, by file, with their types. There may be others.
FIELDS = {
  'metrics.jsonl': {'step': int},
  'timeline.jsonl': {
    **dict.fromkeys(('place', 'what', 'stage'), str),
    **dict.fromkeys(('start', 'end'), float),
    'step': int,
  },
  'notices.jsonl': {'step': int, 'text': str},
  'predictions.jsonl': {'step': int, 'seconds': float, 'stages': dict},
  'samples.jsonl': {'step': int, 'split': str, 'reward': float, **_TEXTS},
  'completions.jsonl': {'set': str, 'problem': int, 'correct': float, **_TEXTS},
  'result.json': {'seconds': float},
  'evaluation.json': {'seconds': float, 'sets': dict},
}
# Numbers that records may lack.
OPTIONAL = {'samples.jsonl': ('correct',)}
# Names for seconds that belong to no stage.
NO_STAGE = ('between stages', 'outside steps')
LAST_STEPS = 4  # Steps whose stages a report draws.


class Series(NamedTuple):
  """A metric over time: `value` after `step` updates, in ascending order."""

  step: np.ndarray
  value: np.ndarray


class Timeline(NamedTuple):
  """When stages ran, from timeline.jsonl.

  Attributes:
    stages: names of all that ran.
    end: seconds after which the last one ended; 0 where none ran.
    last: the records of the last `LAST_STEPS` steps.
  """

  stages: frozenset[str] = frozenset()
  end: float = 0.0
  last: tuple[dict[str, Any], ...] = ()


class Run(NamedTuple):
  """The contents of a run folder.

  Attributes:
    folder: its path.
    series: every metric, by name.
    timeline: when its stages ran.
    result: the contents of result.json; None unless the run finished.
    warm_start: the run of the folder's warm_start folder, if there is one.
    evaluation: the contents of evaluation.json, which --eval_only writes; None
      if there is none.
  """

  folder: pathlib.Path
  series: dict[str, Series]
  timeline: Timeline
  result: dict[str, Any] | None
  warm_start: 'Run | None'
  evaluation: dict[str, Any] | None = None


def read(folder: str | os.PathLike) -> Run:
  """Reads a run folder.

  Raises:
    FileNotFoundError: if it has no metrics.
    NotADirectoryError: if it is a file.
    ValueError: if a file holds something else than runs write.
  """
  folder = pathlib.Path(folder)
  if folder.is_file():
    raise NotADirectoryError(
      f'{folder} is a file, and reports are of run folders: give the --workdir '
      'of a run. The page of a plan is written by --plan_html beside '
      '--plan_only.'
    )
  series = metrics(folder)
  if not series:
    raise FileNotFoundError(
      f'{folder} has no metrics to report: its metrics.jsonl is missing or '
      'empty. Give the --workdir of a run that finished at least one step.'
    )
  inside = folder / 'warm_start'
  return Run(
    folder,
    series,
    _timeline(folder),
    _read_json(folder / 'result.json'),
    read(inside) if any(records(inside, 'metrics.jsonl')) else None,
    _evaluation(folder / 'evaluation.json'),
  )


def metrics(folder: pathlib.Path) -> dict[str, Series]:
  """Every metric of a run folder, by name; none before its first step.

  Raises:
    ValueError: if metrics.jsonl holds something else than runs write.
  """
  found: dict[str, tuple[array.array, array.array]] = {}
  for record in records(folder, 'metrics.jsonl'):
    for name, value in record.items():
      if name != 'step':
        number = _number(value, name, folder / 'metrics.jsonl')
        steps, values = found.setdefault(
          name, (array.array('q'), array.array('d'))
        )
        steps.append(record['step'])
        values.append(number)
  return {name: _series(*columns) for name, columns in found.items()}


def _timeline(folder: pathlib.Path) -> Timeline:
  """Reads timeline.jsonl, whose steps are in ascending order."""
  stages, end, last = set(), 0.0, {}
  for record in records(folder, 'timeline.jsonl'):
    if record['what'] == 'run':
      stages.add(record['stage'])
      end = max(end, record['end'])
      last.setdefault(record['step'], []).append(record)
      if len(last) > LAST_STEPS:
        del last[min(last)]
  found = (record for step in sorted(last) for record in last[step])
  return Timeline(frozenset(stages), end, tuple(found))


def completions(folder: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Yields the records of completions.jsonl, which --eval_only writes."""
  return records(pathlib.Path(folder), 'completions.jsonl')


def records(folder: pathlib.Path, name: str) -> Iterator[dict[str, Any]]:
  """Yields the records of a file of JSON lines in a run folder.

  Raises:
    ValueError: if the file holds something else than runs write.
  """
  path = folder / name
  if not path.exists():
    return
  for record in writers.records(path):
    _check(record, path)
    yield record


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
  try:
    content = json.loads(path.read_text(encoding='utf-8', errors='replace'))
  except (FileNotFoundError, json.JSONDecodeError):
    return None  # Missing or half-written: the run did not finish.
  _check(content, path)
  return content


def _evaluation(path: pathlib.Path) -> dict[str, Any] | None:
  """The contents of evaluation.json: sets of metrics, each with its value."""
  content = _read_json(path)
  for values in content['sets'].values() if content else ():
    if not isinstance(values, dict):
      raise _damaged(path, f'a set {values!r:.50}')
    for name, score in values.items():
      if not isinstance(score, dict) or 'value' not in score:
        raise _damaged(path, f'{name!r:.50} without a value')
      _number(score['value'], name, path)
  return content


class Evaluation(NamedTuple):
  """Scores on held-out problems, with their intervals.

  Attributes:
    folder: where they are, beside the completions.
    step: updates after which a training run was evaluated; None for
      --eval_only.
    content: of evaluation.json.
  """

  folder: pathlib.Path
  step: int | None
  content: dict[str, Any]

  @property
  def after(self) -> str:
    """Words for a title, such as ' after step 20'; '' for --eval_only."""
    return '' if self.step is None else f' after step {self.step:,}'


def newest_evaluation(run: Run) -> Evaluation | None:
  """The evaluation that a run is, or the newest that finished while it trained.

  None if there is none.
  """
  if run.evaluation:
    return Evaluation(run.folder, None, run.evaluation)
  for step, inside in reversed(evaluations.paths(run.folder).items()):
    if content := _evaluation(inside / evaluations.SCORES):
      return Evaluation(inside, step, content)
  return None


def _check(record: Any, path: pathlib.Path):
  """Raises ValueError unless a record has the `FIELDS` of its file."""
  if not isinstance(record, dict):
    raise _damaged(path, f'{record!r:.50} in place of an object')
  for name, kind in FIELDS[path.name].items():
    value = record.get(name)
    if kind is float:
      _number(value, name, path)
    elif not isinstance(value, kind) or (kind is int and abs(value) >= 2**63):
      raise _damaged(path, _binding(name, value))
  for name in OPTIONAL.get(path.name, ()):
    if name in record:
      _number(record[name], name, path)


def _number(value: Any, name: str, path: pathlib.Path) -> float:
  """A metric, which may be written as 'NaN'."""
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise _damaged(path, _binding(name, value)) from None


def _binding(name: str, value: Any) -> str:
  return f'{name!r:.50} = {value!r:.50}'


def _damaged(path: pathlib.Path, what: str) -> ValueError:
  return ValueError(
    f'{path} holds {what}, which no run writes: restore the file, or remove it.'
  )


def _series(steps: array.array, values: array.array) -> Series:
  """A series of the last value of each step."""
  unique, last = np.unique(np.array(steps)[::-1], return_index=True)
  return Series(unique, np.array(values)[::-1][last])


def steps(run: Run) -> int:
  """The number of finished updates."""
  return max(int(series.step[-1]) for series in run.series.values())


def seconds(run: Run) -> float:
  """The duration of a run; estimated if the run did not finish."""
  if record := run.result or run.evaluation:
    return float(record['seconds'])
  sums = [
    np.nansum(run.series[name].value)
    for name in ('time/step', 'time/evaluate')
    if name in run.series
  ]
  return float(max(sum(sums), run.timeline.end))


def stage_seconds(run: Run) -> dict[str, float]:
  """Seconds of each stage over the whole run, the longest first.

  Seconds of steps that belong to no stage, and seconds of the run that belong
  to no step, are listed under the names `NO_STAGE`.
  """
  total = {
    name.removeprefix('time/'): float(np.nansum(series.value))
    for name, series in run.series.items()
    if name.startswith('time/') and name != 'time/step'
  }
  if 'time/step' in run.series:
    in_steps = float(np.nansum(run.series['time/step'].value))
    evaluating = total.get('evaluate', 0.0)
    between, outside = NO_STAGE
    total[between] = in_steps + evaluating - sum(total.values())
    total[outside] = seconds(run) - in_steps - evaluating
  # Stages of several places overlap: their sum may exceed the duration, and
  # the rest is then negative.
  least = 1e-3 * sum(total.values())
  total = {
    name: value
    for name, value in total.items()
    if value > (least if name in NO_STAGE else 0)
  }
  return dict(sorted(total.items(), key=lambda item: item[1], reverse=True))
