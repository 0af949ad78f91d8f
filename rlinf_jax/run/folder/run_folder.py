"""Reads run folders, also of runs that crashed or are still running.

A file that is not written yet reads as empty.
"""

import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.run.folder import writers

# Names for seconds that belong to no stage.
NO_STAGE = ('between stages', 'outside steps')


class Series(NamedTuple):
  """A metric over time: `value` after `step` updates, in ascending order."""

  step: np.ndarray
  value: np.ndarray


class Run(NamedTuple):
  """The contents of a run folder.

  Attributes:
    folder: its path.
    series: every metric, by name.
    runs: the records of timeline.jsonl in which a stage ran.
    samples: the records of samples.jsonl.
    result: the contents of result.json; None unless the run finished.
    warm_start: the run of the folder's warm_start folder, if there is one.
    evaluation: the contents of evaluation.json, which --eval_only writes; None
      if there is none.
  """

  folder: pathlib.Path
  series: dict[str, Series]
  runs: list[dict[str, Any]]
  samples: list[dict[str, Any]]
  result: dict[str, Any] | None
  warm_start: 'Run | None'
  evaluation: dict[str, Any] | None = None


def read(folder: str | os.PathLike) -> Run:
  """Reads a run folder.

  Raises:
    FileNotFoundError: if it has no metrics.
    ValueError: if a line of one of its files is not JSON.
  """
  folder = pathlib.Path(folder)
  series: dict[str, dict[int, float]] = {}
  for record in _records(folder / 'metrics.jsonl'):
    for name, value in record.items():
      if name != 'step':
        series.setdefault(name, {})[record['step']] = float(value)
  if not series:
    raise FileNotFoundError(
      f'{folder} has no metrics to report: its metrics.jsonl is missing or '
      'empty. Give the --workdir of a run that finished at least one step.'
    )
  inside = folder / 'warm_start'
  return Run(
    folder,
    {name: _series(values) for name, values in series.items()},
    [
      record
      for record in _records(folder / 'timeline.jsonl')
      if record['what'] == 'run'
    ],
    _records(folder / 'samples.jsonl'),
    _read_json(folder / 'result.json'),
    read(inside) if _records(inside / 'metrics.jsonl') else None,
    _read_json(folder / 'evaluation.json'),
  )


def completions(folder: str | os.PathLike) -> list[dict[str, Any]]:
  """The records of completions.jsonl, which --eval_only writes."""
  return _records(pathlib.Path(folder) / 'completions.jsonl')


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  return list(writers.records(path)) if path.exists() else []


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (FileNotFoundError, json.JSONDecodeError):
    return None  # Missing or half-written: the run did not finish.


def _series(values: dict[int, float]) -> Series:
  steps = sorted(values)
  return Series(np.array(steps), np.array([values[step] for step in steps]))


def steps(run: Run) -> int:
  """The number of finished updates."""
  return max(int(series.step[-1]) for series in run.series.values())


def seconds(run: Run) -> float:
  """The duration of a run; estimated if the run did not finish."""
  if record := run.result or run.evaluation:
    return float(record['seconds'])
  ends = [record['end'] for record in run.runs]
  sums = [
    np.nansum(run.series[name].value)
    for name in ('time/step', 'time/evaluate')
    if name in run.series
  ]
  return float(max([sum(sums), *ends]))


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
