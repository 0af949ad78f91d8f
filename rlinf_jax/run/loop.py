"""The training loop: steps, evaluations, checkpoints and their records."""

import collections
from collections.abc import Sequence
import dataclasses
import math
import pathlib
import time
from typing import Any

import jax

from rlinf_jax.config import config
from rlinf_jax.planning import monitor as monitor_lib
from rlinf_jax.run import (
  evaluation,
  interrupt,
  profile,
  right_answers,
  run_log,
)
from rlinf_jax.run import skipped as skipped_lib
from rlinf_jax.run_files import checkpoint as checkpoint_lib
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime import programs
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.state import state_readers
from stages import base, metrics
from stages.envs.rollouts import video

# Metrics that count the work of a step → the same work per second.
THROUGHPUT = {
  'rollout/tokens': 'throughput/tokens_per_second',
  'train/tokens': 'throughput/tokens_per_second',
  'env/steps': 'throughput/steps_per_second',
}


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When a run evaluates, saves, records videos and ends.

  Attributes:
    steps: steps of the whole run.
    evaluate_every: steps between evaluations, of which one is before the
      first step and one at the end; 0 for none at all.
    checkpoint_every: steps between checkpoints.
    stop_at_score: score at which the run ends early; None for never.
    video_every_evals: evaluations between videos; 0 for none.
    max_skipped_steps: steps in a row without a finite gradient, after which
      the run ends.
    profile_step: the step that is profiled; 0 for none.
    keep_completions: evaluations whose completions are kept, the newest.
  """

  steps: int
  evaluate_every: int
  checkpoint_every: int
  stop_at_score: float | None
  video_every_evals: int
  max_skipped_steps: int
  profile_step: int = 0
  keep_completions: int = 0

  def __post_init__(self):
    if self.stop_at_score is not None and not self.evaluate_every:
      raise ValueError(
        f'stop_at_score = {self.stop_at_score} ends the run by the score of an '
        'evaluation, and evaluate_every = 0 makes none: set evaluate_every to '
        'a number of steps, or leave stop_at_score out.'
      )

  def next_pause(self, step: int) -> int:
    """The update after `step` at which no later step may be in progress.

    Evaluations and checkpoints need the state of one step, not of a later one.
    """
    periods = [n for n in (self.evaluate_every, self.checkpoint_every) if n]
    return min(self.steps, step + min(n - step % n for n in periods))

  def is_evaluation(self, step: int) -> bool:
    every = self.evaluate_every
    return every > 0 and (step == self.steps or step % every == 0)

  def is_checkpoint(self, step: int) -> bool:
    return step % self.checkpoint_every == 0

  def is_video(self, step: int) -> bool:
    """Whether the evaluation after `step`, if not the last, records a video."""
    every = self.video_every_evals
    return every > 0 and step // self.evaluate_every % every == 0


class Loop:
  """The state of a run between steps.

  As many steps may be in progress as the workflow's staleness allows; they end
  in the order in which they were submitted.

  Attributes:
    runtime: runs the plan; replaced when the plan changes between steps.
    steps: updates finished.
  """

  def __init__(
    self,
    *,
    runtime: runtime_base.Runtime,
    workflow: base.Workflow,
    source: base.Source,
    checkpoints: checkpoint_lib.Checkpoints,
    log: run_log.RunLog,
    seed: int,
    first: state_readers.FirstState,
    start: checkpoint_lib.CheckpointState,
    stop: interrupt.Interrupt,
    monitor: monitor_lib.PlanMonitor | None = None,
  ):
    self.runtime, self._source = runtime, source
    self._staleness, self._score = workflow.staleness, workflow.score
    self._monitor, self._next_plan = monitor, None
    self._video = None  # Frames of the last evaluation.
    self._checkpoints, self._log = checkpoints, log
    self._seed, self._key = seed, jax.random.key(seed)
    self._held_out = evaluation.HeldOut.of(source)
    self._source_state, self._first = start.source, first
    self.steps = self._submitted = start.step
    self._interrupt = stop
    self._metrics = dict(start.metrics)  # By updates finished.
    # Steps submitted and not finished, with their batches.
    self._pending = collections.deque()
    # An evaluation after the last step is in no metric of that step.
    known = log.evaluation(self.steps) or {}
    before = known.get(evaluation.SECONDS, 0.0)
    before += self.metrics.get('throughput/seconds', 0.0)
    self._start_time = time.perf_counter() - before
    self._step_end = time.perf_counter()

  @property
  def metrics(self) -> dict[str, float]:
    """The last value of each metric."""
    return self._metrics.get(self.steps, {})

  def _update_metrics(self, values: dict[str, float]):
    self._metrics[self.steps] = self.metrics | values

  def seconds(self) -> float:
    """Seconds of training, without the time before a resumption."""
    return time.perf_counter() - self._start_time

  def run(self, folder: pathlib.Path, schedule: Schedule):
    """Trains to the end; evaluates before, during and after training.

    Raises:
      KeyboardInterrupt: if the run was asked to stop; a checkpoint is written.
    """
    with interrupt.handle_signals(self._interrupt):
      if schedule.is_evaluation(self.steps):
        self._evaluate_start(schedule)
      self._train(folder, schedule)
    self._checkpoints.close()

  def _evaluate_start(self, schedule: Schedule):
    """Evaluates the policy that the run starts with, unless it was before.

    An interrupted run leaves this evaluation to the one that continues it.
    """
    known = self._log.evaluation(self.steps)
    if known is None:
      self._evaluate(schedule)
    else:
      self._update_metrics(known)

  def _train(self, folder: pathlib.Path, schedule: Schedule):
    first = self.steps
    skipped = skipped_lib.SkippedUpdates(schedule.max_skipped_steps, folder)
    while self.steps < schedule.steps and not self._reached(schedule):
      if self._interrupt.requested and not self._pending:
        self._stop()
      with profile.record(folder, self.steps + 1 == schedule.profile_step):
        samples, batch = self.step(schedule.next_pause(self.steps))
      if self.steps == first + 1:
        config.save_operative(folder / 'operative_config.gin')
      self._count_skipped(skipped)
      if schedule.is_evaluation(self.steps):
        self._write_samples('train', samples, [batch])
        self._evaluate(schedule)
      if self._is_last(schedule) or schedule.is_checkpoint(self.steps):
        self.save()

  def _count_skipped(self, skipped: skipped_lib.SkippedUpdates):
    """Prints that updates were skipped; a run without others ends."""
    try:
      notice = skipped.update(self.steps, self.metrics)
    except skipped_lib.NotFiniteError:
      if not self._pending and self._checkpoints.latest() != self.steps:
        self.save()
      self._checkpoints.close()
      raise
    if notice:
      self._log.print(notice)

  def _reached(self, schedule: Schedule) -> bool:
    """Whether the score is high enough to end the run."""
    target = schedule.stop_at_score
    score = self.metrics.get(self._score, -math.inf)
    return target is not None and score >= target

  def _is_last(self, schedule: Schedule) -> bool:
    return self.steps == schedule.steps or self._reached(schedule)

  def _stop(self):
    """Ends an interrupted run with a checkpoint."""
    if self.steps and self._checkpoints.latest() != self.steps:
      self.save()
    self._checkpoints.close()
    raise KeyboardInterrupt

  def step(self, pause: int) -> tuple[dict[str, Any], Any]:
    """Waits for the oldest submitted update, and logs its metrics.

    Args:
      pause: the update after which no later step may be in progress.

    Returns:
      Sample rows of the step, by name, and its batch.
    """
    if not self._pending:
      self._step_end = time.perf_counter()
    self._submit_steps(pause)
    batch, result = self._pending.popleft()
    info = result.result()
    for notice in self.runtime.notices():
      self._log.notice(self.steps + 1, notice)
    if not self._pending:
      self.runtime.wait()
    info = jax.device_get(info)
    seconds = time.perf_counter() - self._step_end
    self._step_end += seconds
    self._metrics[self.steps + 1] = self.metrics
    self._metrics.pop(self.steps - self._staleness, None)
    self.steps += 1
    values, samples = metrics.read(info)
    spans = self.runtime.timeline.take(self.steps)
    values['time/step'] = seconds
    values['throughput/seconds'] = self.seconds()
    values |= _time_metrics(spans, seconds) | profile.memory()
    self._check_prediction(seconds, timeline_lib.stage_seconds(spans))
    for name, per_second in THROUGHPUT.items():
      if name in values:
        values[per_second] = values[name] / seconds
    self._log.write_metrics(self.steps, values)
    self._log.write_timeline(self.steps, spans)
    self._update_metrics(values)
    return samples, batch

  def _submit_steps(self, pause: int):
    """Submits as many steps as staleness and the next pause allow."""
    last = min(pause, self.steps + 1 + self._staleness)
    while self._submitted < last:
      if (self._next_plan or self._interrupt.requested) and self._pending:
        break  # Submitted steps finish first.
      self._change_plan()
      # The source reads metrics of a fixed number of steps before, so that its
      # batches do not depend on which of the pending steps have finished.
      known = self._metrics.get(self._submitted - self._staleness, {})
      self._source_state, batch = self._source.next(self._source_state, known)
      key = jax.random.fold_in(self._key, self._submitted)
      self._pending.append((batch, self.runtime.submit(batch, key)))
      self._submitted += 1

  def _check_prediction(self, seconds: float, by_stage: dict[str, float]):
    """Compares a step with its prediction, which may lead to another plan."""
    if not self._monitor:
      return
    before = self._monitor.chosen
    better = self._monitor.update(seconds, by_stage)
    self._next_plan = better or self._next_plan
    if self._monitor.chosen is not before and not self._next_plan:
      self._log.write_prediction(self.steps, self._monitor.chosen.prediction)

  def _change_plan(self):
    """Moves the run to the runtime of a better plan, if one was found.

    The state goes by a checkpoint, as every place writes and reads its own.
    """
    if not self._next_plan:
      return
    old, chosen, self._next_plan = self.runtime, self._next_plan, None
    if self._checkpoints.latest() != self.steps:
      self.save()
    self._checkpoints.wait()
    old.close()  # Before the new runtime starts: it needs the devices.
    self.runtime = self._monitor.runtime(old.timeline)
    shapes = programs.state_shapes(self.runtime.lowered['step'].flow)
    state = self._checkpoints.state(shapes, self._first)
    self.runtime.start(state, self.steps)
    self._log.write_plan(self.runtime.plan)
    self._log.write_prediction(self.steps, chosen.prediction)
    self._log.print(
      'Steps did not take as long as predicted, so the plan changes. '
      f'{self._monitor.summary()}'
    )

  def _evaluate(self, schedule: Schedule):
    """Evaluates the policy; writes a video if one is due.

    Raises:
      KeyboardInterrupt: if the run was asked to stop, also in between.
    """
    self.evaluate(schedule.keep_completions)
    wanted = schedule.video_every_evals and self._is_last(schedule)
    if wanted or schedule.is_video(self.steps):
      self._log.write_video(self.steps, self._video)

  def evaluate(self, keep_completions: int):
    """Evaluates the policy on all held-out problems.

    Args:
      keep_completions: evaluations whose completions are kept, the newest.

    Raises:
      KeyboardInterrupt: if the run was asked to stop before the last batch;
        nothing of the evaluation is written then, but a checkpoint is.
    """
    start = time.perf_counter()
    infos = []
    for i in range(len(self._held_out.batches)):
      if self._interrupt.requested:
        self._stop()
      infos.append(
        evaluation.evaluate_batch(self.runtime, self._held_out, i, self._key)
      )
    self.runtime.timeline.take()  # Spans of an evaluation belong to no step.
    values, samples = evaluation.summarize(infos, self._held_out.names)
    values[evaluation.SECONDS] = time.perf_counter() - start
    self._log.write_evaluation(
      self.steps, self._seed, self._held_out, infos, values, keep_completions
    )
    self._video = samples.pop(video.NAME, None)
    few = {name: evaluation.few_rows(rows) for name, rows in samples.items()}
    self._write_samples('eval', few, self._held_out.batches)
    self._update_metrics(values)

  def _write_samples(
    self, split: str, samples: dict[str, Any], batches: Sequence[Any]
  ):
    for rows in samples.values():
      right = right_answers.by_prompt(rows, batches)
      self._log.write_samples(self.steps, split, rows, right)

  def save(self):
    """Starts to write a checkpoint."""
    self._checkpoints.save(
      self.steps, self.runtime, self._source_state, self._metrics
    )

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    # After the death of a process the run is restarted in the same runtime.
    if not (kind and issubclass(kind, runtime_base.ProcessDiedError)):
      self.runtime.close()


def _time_metrics(spans, seconds: float) -> dict[str, float]:
  """Seconds of each stage, utilization of places, and idle fractions."""
  by_stage = timeline_lib.seconds(spans)
  values = {f'time/{stage}': spent for stage, spent in by_stage.items()}
  by_place = timeline_lib.seconds(spans, 'place')
  if len(by_place) > 1:
    values |= {
      f'utilization/{place}': spent / seconds
      for place, spent in by_place.items()
    }
  idle = timeline_lib.idle_fractions(spans)
  return values | {f'wait/{name}': share for name, share in idle.items()}
