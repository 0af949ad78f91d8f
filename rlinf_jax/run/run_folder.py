"""What a run left in its folder, read back for people.

A run that crashed, or still runs, can be read too: what is not there yet is
empty.
"""

import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from rlinf_jax.run import writers

# Seconds that belong to no stage.
REST = ('between stages', 'outside steps')


class Series(NamedTuple):
  """One metric: `value` after `step` updates, steps ascending."""

  step: np.ndarray
  value: np.ndarray


class Run(NamedTuple):
  """What a run folder holds.

  Attributes:
    folder: where it is.
    series: every metric by name.
    runs: the records of timeline.jsonl in which a stage ran.
    samples: the records of samples.jsonl.
    result: what result.json says; None unless the run finished.
    warm_start: the run this one started from, if it lies inside.
  """

  folder: pathlib.Path
  series: dict[str, Series]
  runs: list[dict[str, Any]]
  samples: list[dict[str, Any]]
  result: dict[str, Any] | None
  warm_start: 'Run | None'


def read(folder: str | os.PathLike) -> Run:
  """Reads a run folder, however far its run came.

  Raises:
    FileNotFoundError: it has no metrics.
    ValueError: one of its files is broken in the middle.
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
    _result(folder / 'result.json'),
    read(inside) if _records(inside / 'metrics.jsonl') else None,
  )


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  return list(writers.records(path)) if path.exists() else []


def _result(path: pathlib.Path) -> dict[str, Any] | None:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (FileNotFoundError, json.JSONDecodeError):
    return None  # Not written, or killed while writing: not finished.


def _series(values: dict[int, float]) -> Series:
  steps = sorted(values)
  return Series(np.array(steps), np.array([values[step] for step in steps]))


def steps(run: Run) -> int:
  return max(int(series.step[-1]) for series in run.series.values())


def seconds(run: Run) -> float:
  """How long the run took, as far as its folder tells."""
  if run.result:
    return float(run.result['seconds'])
  known = [record['end'] for record in run.runs]
  counted = [
    np.nansum(run.series[name].value)
    for name in ('time/step', 'time/evaluate')
    if name in run.series
  ]
  return float(max([sum(counted), *known]))


def stage_seconds(run: Run) -> dict[str, float]:
  """Seconds by stage over the whole run, biggest first.

  What steps took beyond their stages, and what a finished run took beyond its
  steps, come under names of their own.
  """
  total = {
    name.removeprefix('time/'): float(np.nansum(series.value))
    for name, series in run.series.items()
    if name.startswith('time/') and name != 'time/step'
  }
  if 'time/step' in run.series:
    in_steps = float(np.nansum(run.series['time/step'].value))
    evaluating = total.get('evaluate', 0.0)
    between, outside = REST
    total[between] = in_steps + evaluating - sum(total.values())
    total[outside] = seconds(run) - in_steps - evaluating
  # Stages of several places overlap: then there is no rest, but a surplus.
  least = 1e-3 * sum(total.values())
  total = {
    name: value
    for name, value in total.items()
    if value > (least if name in REST else 0)
  }
  return dict(sorted(total.items(), key=lambda item: item[1], reverse=True))
