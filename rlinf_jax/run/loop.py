"""The training loop: steps, evaluations, checkpoints, and what is written."""

import collections
import functools
import math
import time
from typing import Any

import jax

from rlinf_jax import config
from rlinf_jax.run import checkpoint as checkpoint_lib
from rlinf_jax.run import interrupt
from rlinf_jax.runtime import base
from rlinf_jax.runtime import timeline as timeline_lib
from stages import metrics
from stages.envs import video

# What a step counts, and what it is called by the second.
SPEEDS = {
  'rollout/tokens': 'throughput/tokens_per_second',
  'train/tokens': 'throughput/tokens_per_second',
  'env/steps': 'throughput/steps_per_second',
}


class Loop:
  """Where a run is: what must survive from step to step.

  Attributes:
    runtime: what runs the plan, which may change between steps.
    steps: updates finished.
    metrics: the last value of each.
  """

  def __init__(
    self, runtime, workflow, source, checkpoints, notes, seed, saved, watch=None
  ):
    self.runtime, self._source = runtime, source
    self._lag, self._score = workflow.staleness, workflow.score
    self._watch, self._better = watch, None
    self._film = None  # Of the last evaluation.
    self._checkpoints, self._notes = checkpoints, notes
    self._key = jax.random.key(seed)
    self._held_out = source.held_out()
    self._state = saved.source
    self.steps = self._begun = saved.step
    self._interrupt = interrupt.Interrupt()
    self._known = dict(saved.metrics)  # By updates finished.
    self._flying = collections.deque()  # Steps begun and not finished.
    self._began = time.perf_counter() - self.metrics.get(
      'throughput/seconds', 0.0
    )
    self._last = time.perf_counter()

  @property
  def metrics(self) -> dict[str, float]:
    return self._known.get(self.steps, {})

  def _learn(self, numbers):
    self._known[self.steps] = self.metrics | numbers

  def run(self, folder, steps, evaluate_every, until, checkpoint_every, videos):
    """Trains to the end; evaluates first, in between and last."""
    with interrupt.listening() as self._interrupt:
      if not self.steps:
        self.evaluate()
        if videos:
          self._notes.film(0, self._film)
      self._run(folder, steps, evaluate_every, until, checkpoint_every, videos)
    self._checkpoints.close()

  def _run(
    self, folder, steps, evaluate_every, until, checkpoint_every, videos
  ):
    first = self.steps
    while self.steps < steps and not self._reached(until):
      if self._interrupt.asked and not self._flying:
        self._stop()
      # What is evaluated or saved is a state at rest.
      rests = [n - self.steps % n for n in (evaluate_every, checkpoint_every)]
      rows = self.step(min(steps, self.steps + min(rests)))
      if self.steps == first + 1:
        config.save_operative(folder / 'operative_config.gin')
      last = self.steps == steps
      if last or self.steps % evaluate_every == 0:
        self._show(rows)
        self.evaluate()
        last |= self._reached(until)
        due = videos and not self.steps // evaluate_every % videos
        if due or (videos and last):
          self._notes.film(self.steps, self._film)
      if last or self.steps % checkpoint_every == 0:
        self.save()

  def _stop(self):
    """Ends a run that somebody has asked to end."""
    if self.steps and self._checkpoints.latest() != self.steps:
      self.save()
    self._checkpoints.close()
    raise KeyboardInterrupt

  def seconds(self) -> float:
    """Since training began, time between a stop and its resumption apart."""
    return time.perf_counter() - self._began

  def _reached(self, score):
    now = self.metrics.get(self._score, -math.inf)
    return score is not None and now >= score

  def _begin(self):
    """Begins the next step, while as many as the lag may not have ended."""
    # What the source is told does not depend on which of them have.
    told = self._known.get(self._begun - self._lag, {})
    self._state, batch = self._source.next(self._state, told)
    key = jax.random.fold_in(self._key, self._begun)
    self._flying.append(self.runtime.submit(batch, key))
    self._begun += 1

  def step(self, rest: int) -> dict[str, Any]:
    """One update; returns what it shows of its rows.

    Args:
      rest: the update after which no other may have been begun.
    """
    if not self._flying:
      self._last = time.perf_counter()
    while self._begun < min(rest, self.steps + 1 + self._lag):
      if (self._better or self._interrupt.asked) and self._flying:
        break  # What was begun ends first.
      self._replan()
      self._begin()
    info = self._flying.popleft().result()
    for line in self.runtime.notices():
      self._notes.say(line)
    if not self._flying:
      self.runtime.wait()
    info = jax.device_get(info)
    seconds = time.perf_counter() - self._last
    self._last += seconds
    self._known[self.steps + 1] = self.metrics
    self._known.pop(self.steps - self._lag, None)
    self.steps += 1
    numbers, rows = metrics.read(info)
    spans = self.runtime.timeline.take(self.steps)
    numbers['time/step'] = seconds
    numbers['throughput/seconds'] = self.seconds()
    by_stage = timeline_lib.seconds(spans)
    numbers |= {f'time/{stage}': spent for stage, spent in by_stage.items()}
    by_place = timeline_lib.seconds(spans, 'place')
    if len(by_place) > 1:
      numbers |= {
        f'utilization/{place}': spent / seconds
        for place, spent in by_place.items()
      }
    numbers |= {
      f'wait/{who}': share
      for who, share in timeline_lib.idle_fractions(spans).items()
    }
    self._compare(seconds, timeline_lib.stage_seconds(spans))
    for name, speed in SPEEDS.items():
      if name in numbers:
        numbers[speed] = numbers[name] / seconds
    self._notes.numbers(self.steps, numbers)
    self._notes.spans(self.steps, spans)
    self._learn(numbers)
    return rows

  def _compare(self, seconds: float, by_stage):
    """Holds a step against its prediction."""
    if not self._watch:
      return
    before = self._watch.chosen
    self._better = self._watch.see(seconds, by_stage) or self._better
    if self._watch.chosen is not before and not self._better:
      self._notes.prediction(self.steps, self._watch.chosen.prediction)

  def _replan(self):
    """Moves the state to a better plan, if one was found."""
    if not self._better:
      return
    old, chosen, self._better = self.runtime, self._better, None
    state = old.state()
    old.close()  # First: processes give back their devices.
    self.runtime = self._watch.runtime(old.timeline)
    self.runtime.load(state, self.steps)
    self._notes.plan(chosen.plan)
    self._notes.prediction(self.steps, chosen.prediction)
    self._notes.say(f'Steps are not as predicted. {self._watch.told()}')

  def evaluate(self):
    """Asks all held-out problems."""
    start = time.perf_counter()
    infos = [
      jax.device_get(self.runtime.evaluate(batch, self._key))
      for batch in self._held_out
    ]
    self.runtime.timeline.take()  # They belong to no step.
    numbers, rows = metrics.read(functools.reduce(metrics.merge, infos))
    numbers['time/evaluate'] = time.perf_counter() - start
    self._notes.numbers(self.steps, numbers)
    self._film = rows.pop(video.NAME, None)
    self._show(rows)
    self._learn(numbers)

  def _show(self, rows):
    for name, shown in rows.items():
      self._notes.samples(self.steps, name.split('/')[0], shown)

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    # Places of which one has died are used again.
    if not (kind and issubclass(kind, base.ProcessDiedError)):
      self.runtime.close()

  def save(self):
    self._checkpoints.save(
      checkpoint_lib.Saved(
        self.steps, self.runtime.state(), self._state, self._known
      )
    )
