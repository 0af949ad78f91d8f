"""What steps were predicted to take, against what they took."""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from rlinf_jax.run import writers


class Line(NamedTuple):
  """A stage, or the whole step.

  Attributes:
    name: of the stage; 'step' for all of it.
    predicted: seconds a step.
    measured: the median of seconds a step; None if no step was made since.
    source: 'measured' ahead of the run, or 'modeled'; '' for a step.
  """

  name: str
  predicted: float
  measured: float | None
  source: str

  @property
  def ratio(self) -> float | None:
    """Measured over predicted."""
    if self.measured is None or not self.predicted:
      return None
    return self.measured / self.predicted


def table(folder: str | os.PathLike) -> list[Line]:
  """The last prediction of a run against the steps since, longest first.

  Empty where nothing was predicted: the plan was given, not found.
  """
  folder = pathlib.Path(folder)
  told = _lines(folder / 'predictions.jsonl')
  if not told:
    return []
  last = told[-1]
  took = [
    line
    for line in _lines(folder / 'metrics.jsonl')
    if 'time/step' in line and line['step'] > last['step']
  ]
  took = took[1:]  # The first step of a process, or of a plan, compiles.

  def line(name, predicted, source):
    seconds = [x[f'time/{name}'] for x in took if f'time/{name}' in x]
    measured = float(np.median(seconds)) if seconds else None
    return Line(name, predicted, measured, source)

  stages = [line(name, *number) for name, number in last['stages'].items()]
  stages.sort(key=lambda some: -some.predicted)
  return [line('step', last['seconds'], ''), *stages]


def in_words(folder: str | os.PathLike) -> str | None:
  """The step's line for people; None where there is nothing to compare."""
  lines = table(folder)
  if not lines or lines[0].ratio is None:
    return None
  step = lines[0]
  return (
    f'{step.predicted:.3g} s a step, measured {step.measured:.3g} s '
    f'({step.ratio:.2f} times)'
  )


def _lines(path: pathlib.Path) -> list[dict]:
  return list(writers.records(path)) if path.exists() else []
