"""The log of a run: metrics, timeline, samples, predictions and videos."""

from collections.abc import Sequence
import contextlib
import functools
import pathlib
from typing import Any

import numpy as np

from planner.ir import plan as plan_lib
from rlinf_jax.planning import autoplan
from rlinf_jax.report import video
from rlinf_jax.run import console, evaluation, evaluation_files
from rlinf_jax.run_files import evaluations, failures, writers
from rlinf_jax.runtime import timeline
from rlinf_jax.system import whole_file
from stages import base
from stages.language import tokens


class RunLog:
  """The open files of a run folder, and the console.

  Attributes:
    print: `text -> None`, prints lines on the console.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    source: base.Source,
    steps: int,
    start: int,
    wandb: str | None,
  ):
    """Opens the files, and removes their records of steps after `start`.

    Args:
      folder: the run folder.
      source: decodes the tokens of samples by its `text`.
      steps: steps of the whole run.
      start: updates finished before.
      wandb: project at Weights & Biases, if metrics go there too.
    """
    self._source, self._folder = source, folder
    # A run that starts at step 0 repeats its first evaluation.
    last_kept = start or -1
    timeline_file = folder / 'timeline.jsonl'
    self._timeline = writers.json_lines(timeline_file, last_kept)
    # The clock of a resumed run goes on where that of the kept steps ends.
    ends = [record['end'] for record in writers.last_records(timeline_file)]
    self._timeline_end = max(ends, default=None)
    self._ahead = None  # Seconds to add to the clock of the runtime.
    self._samples = writers.json_lines(folder / 'samples.jsonl', last_kept)
    video.truncate(folder, last_kept)
    evaluations.truncate(folder, last_kept)
    self._predictions = writers.json_lines(
      folder / 'predictions.jsonl', last_kept
    )
    if (folder / failures.FILE).exists():
      writers.truncate(folder / failures.FILE, last_kept)
    self._metric_writers = [
      writers.json_lines(folder / 'metrics.jsonl', last_kept),
      writers.tensorboard(folder / 'events', start),
    ]
    if wandb:
      self._metric_writers.append(writers.wandb(wandb, folder))
    self._console = console.create(steps, start)
    self.print = self._console.print

  def write_metrics(self, step: int, values: dict[str, float]):
    for writer in [*self._metric_writers, self._console]:
      writer.write(step, values)

  def write_evaluation(
    self,
    step: int,
    seed: int,
    held_out: evaluation.HeldOut,
    infos: Sequence[base.Info],
    values: dict[str, float],
    keep_completions: int,
  ):
    """Writes an evaluation: its own folder, and then its metrics.

    Args:
      step: updates finished.
      seed: of the run.
      held_out: the batches.
      infos: the metrics of each batch.
      values: the numbers of all.
      keep_completions: evaluations whose completions are kept, the newest.
    """
    folder = evaluations.path(self._folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    if keep_completions:
      with evaluation_files.completions(
        folder, self._source, held_out
      ) as write:
        for i, info in enumerate(infos):
          write(i, info)
    run = str(self._folder.resolve())
    subject = {'run': run, 'seed': seed, 'step': step}
    evaluation_files.write_scores(folder, values, infos, held_out, subject)
    evaluations.keep_completions(self._folder, keep_completions)
    # The last, as a resumed run makes no evaluation that they have.
    self.write_metrics(step, values)

  def evaluation(self, step: int) -> dict[str, float] | None:
    """The metrics of the evaluation after `step`; None if there was none."""
    for record in writers.records(self._folder / 'metrics.jsonl'):
      if record['step'] == step and evaluation.SECONDS in record:
        del record['step']
        return {name: float(value) for name, value in record.items()}
    return None

  def notice(self, step: int, text: str):
    """Prints and writes that something went wrong, or is not as usual."""
    self.print(text)
    # Most runs have none, and no file for them.
    writer = writers.json_lines(self._folder / failures.FILE)
    writer.write(step, {'text': text})
    writer.close()

  def write_timeline(self, step: int, spans: Sequence[timeline.Span]):
    """Writes the spans of a step, on one clock for all processes of a run."""
    if self._ahead is None and spans:
      start = min(span.start for span in spans)
      end = self._timeline_end
      self._ahead = 0.0 if end is None else end - start
    for span in spans:
      values = {
        'place': span.place,
        'what': span.what,
        'stage': span.stage,
        'piece': span.piece,
        'start': round(span.start + self._ahead, 6),
        'end': round(span.end + self._ahead, 6),
        'cpu': round(span.cpu, 6),
      }
      self._timeline.write(step, values)

  def write_plan(self, plan: plan_lib.Plan):
    """Replaces plan.json by the plan of the next steps."""
    whole_file.write_text(self._folder / 'plan.json', plan.to_json())

  def write_prediction(self, step: int, prediction: autoplan.Prediction):
    """Writes the seconds predicted for each step after `step`."""
    stages = {name: list(n) for name, n in prediction.stages.items()}
    self._predictions.write(
      step, {'seconds': prediction.step, 'stages': stages}
    )

  def write_video(self, step: int, frames: dict[str, np.ndarray] | None):
    """Writes the frames of an evaluation as a video, if there are any."""
    if frames:
      notify = functools.partial(self.notice, step)
      video.try_write(self._folder, step, frames, notify)

  def write_samples(
    self,
    step: int,
    split: str,
    rows: dict[str, Any],
    answers: Sequence[str | None],
  ):
    """Writes prompts and completions as text, and their scores.

    Args:
      step: updates finished.
      split: 'train' or 'eval'.
      rows: token ids and masks of prompts and completions, rewards, and of an
        evaluation whether they are correct.
      answers: the right answer of each row, or None.
    """
    prompts = self._source.text(rows['prompt'], rows['prompt_mask'])
    completions = self._source.text(
      rows['completion'], tokens.through_last(rows['completion_mask'])
    )
    columns = {'prompt': prompts, 'completion': completions} | {
      name: np.asarray(rows[name]).tolist()
      for name in ('reward', 'correct')
      if name in rows
    }
    for right, *values in zip(answers, *columns.values(), strict=True):
      record = dict(zip(columns, values, strict=True))
      known = {} if right is None else {'answer': right}
      self._samples.write(step, {'split': split, **record, **known})

  def close(self):
    """Closes all files and removes the progress bar.

    Raises:
      OSError: if one cannot be written to its end; the others are closed.
    """
    with contextlib.ExitStack() as stack:
      for writer in [
        self._predictions,
        self._samples,
        self._timeline,
        *self._metric_writers,
        self._console,
      ]:
        stack.callback(writer.close)

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    # A disk that is full must not hide why the run ends.
    with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
      self.close()
