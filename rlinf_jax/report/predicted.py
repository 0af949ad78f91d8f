"""Comparison of predicted and measured seconds of steps and stages."""

import collections
import os
import pathlib
from typing import NamedTuple

import numpy as np

from rlinf_jax.run_files import run_folder


class Row(NamedTuple):
  """Seconds of a stage or of the whole step.

  Attributes:
    name: of the stage; 'step' for the whole step.
    predicted: seconds per step.
    measured: median seconds per step; None if no step followed the prediction.
    source: basis of the prediction, 'measured' or 'modeled'; '' for a step.
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


def table(folder: str | os.PathLike) -> list[Row]:
  """Compares a run's last prediction with the steps after it.

  Returns:
    The step, then its stages, the longest first. Empty if there is no
    prediction because the plan was given by the recipe.
  """
  folder = pathlib.Path(folder)
  predictions = run_folder.records(folder, 'predictions.jsonl')
  if not (newest := collections.deque(predictions, maxlen=1)):
    return []
  (last,) = newest
  steps = [
    {name: x for name, x in line.items() if name.startswith('time/')}
    for line in run_folder.records(folder, 'metrics.jsonl')
    if 'time/step' in line and line['step'] > last['step']
  ]
  steps = steps[1:]  # The first step of a process, or of a plan, compiles.

  def row(name, predicted, source):
    seconds = [x[f'time/{name}'] for x in steps if f'time/{name}' in x]
    measured = float(np.median(seconds)) if seconds else None
    return Row(name, predicted, measured, source)

  stages = [row(name, *number) for name, number in last['stages'].items()]
  stages.sort(key=lambda stage: -stage.predicted)
  return [row('step', last['seconds'], ''), *stages]


def describe_step(folder: str | os.PathLike) -> str | None:
  """Describes predicted and measured seconds of a step; None without both."""
  rows = table(folder)
  if not rows or rows[0].ratio is None:
    return None
  step = rows[0]
  return (
    f'{step.measured:.3g} s measured, {step.predicted:.3g} s predicted '
    f'(ratio {step.ratio:.2f})'
  )
