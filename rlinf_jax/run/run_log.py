"""What a run writes down as it goes: numbers, times, samples."""

from collections.abc import Iterator
import contextlib
import pathlib
from typing import Any

import numpy as np

from planner.ir import plan as plan_lib
from rlinf_jax.planning import autoplan
from rlinf_jax.report import video
from rlinf_jax.run import console, writers
from stages import base


class Record:
  """The open files of a run folder, and the console beside them."""

  def __init__(
    self,
    folder: pathlib.Path,
    source: base.Source,
    steps: int,
    start: int,
    wandb: str | None,
  ):
    """Opens them; what they hold of steps after `start` is taken back.

    Args:
      folder: of the run.
      source: whose `text` makes samples readable.
      steps: updates of the whole run.
      start: those finished before.
      wandb: project at Weights & Biases, if metrics shall go there.
    """
    self._source, self._folder = source, folder
    # No checkpoint is of step 0: who begins there evaluates again.
    kept = start or -1
    self._timeline = writers.json_lines(folder / 'timeline.jsonl', kept)
    self._samples = writers.json_lines(folder / 'samples.jsonl', kept)
    video.truncate(folder, kept)
    self._predictions = writers.json_lines(folder / 'predictions.jsonl', kept)
    self._numbers = [
      writers.json_lines(folder / 'metrics.jsonl', kept),
      writers.tensorboard(folder / 'events', start),
    ]
    if wandb:
      self._numbers.append(writers.wandb(wandb, folder))
    self._console = console.view(steps, start)
    self.say = self._console.say

  def numbers(self, step: int, values: dict[str, float]):
    for writer in [*self._numbers, self._console]:
      writer.write(step, values)

  def spans(self, step: int, spans):
    for span in spans:
      values = {
        'place': span.place,
        'what': span.what,
        'stage': span.stage,
        'piece': span.piece,
        'start': round(span.start, 6),
        'end': round(span.end, 6),
        'cpu': round(span.cpu, 6),
      }
      self._timeline.write(step, values)

  def plan(self, plan: plan_lib.Plan):
    """Writes the plan by which the run goes on."""
    (self._folder / 'plan.json').write_text(plan.to_json())

  def prediction(self, step: int, prediction: autoplan.Prediction):
    """Writes what steps after `step` are expected to take."""
    stages = {name: list(n) for name, n in prediction.stages.items()}
    self._predictions.write(
      step, {'seconds': prediction.step, 'stages': stages}
    )

  def film(self, step: int, shown: dict[str, np.ndarray] | None):
    """Writes a video of what `stages.film` shows, if there is anything."""
    if shown:
      video.attempt(self._folder, step, shown, self.say)

  def samples(self, step: int, split: str, rows: dict[str, Any]):
    """Writes rows such as `held_out.show` makes, as text."""
    prompts = self._source.text(rows['prompt'], rows['prompt_mask'])
    said = self._source.text(rows['completion'], rows['completion_mask'])
    for prompt, completion, reward in zip(
      prompts, said, np.asarray(rows['reward']).tolist(), strict=True
    ):
      self._samples.write(
        step,
        {
          'split': split,
          'prompt': prompt,
          'completion': completion,
          'reward': reward,
        },
      )

  def close(self):
    for writer in [
      self._console,
      *self._numbers,
      self._timeline,
      self._samples,
      self._predictions,
    ]:
      writer.close()


@contextlib.contextmanager
def opened(*args, **kwargs) -> Iterator[Record]:
  """A `Record` that is closed whatever happens."""
  record = Record(*args, **kwargs)
  try:
    yield record
  finally:
    record.close()
