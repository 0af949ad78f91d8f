"""The training loop."""

import collections
from collections.abc import Callable, Mapping
import contextlib
import functools
import json
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax

from planner import flow as flow_lib
from planner import graph as graph_lib
from planner import listing
from planner import plan as plan_lib
from rlinf_jax import checkpoint as checkpoint_lib
from rlinf_jax import config, console, record, trace
from rlinf_jax.runtime import local
from rlinf_jax.runtime import timeline as timeline_lib
from stages import base, metrics


class Result(NamedTuple):
  """What came of a run.

  Attributes:
    folder: of the run.
    steps: updates made.
    seconds: spent training, evaluations and earlier processes included.
    metrics: the last value of each.
  """

  folder: pathlib.Path
  steps: int
  seconds: float
  metrics: dict[str, float]


def train(
  workflow: base.Workflow,
  source: base.Source,
  *,
  workdir: str,
  steps: int,
  seed: int = 0,
  resume: bool = False,
  prepare: Callable[..., Any] | None = None,
  plan: Mapping[str, Any] | str | None = None,
  evaluate_every: int = 20,
  until: float | None = None,
  checkpoint_every: int = 50,
  keep: int = 2,
  export: Callable[..., None] | None = None,
  wandb: str | None = None,
  only_plan: Callable[..., Any] | None = None,
) -> Result | None:
  """Runs a workflow to its end and leaves a run folder behind.

  Args:
    workflow: what to run.
    source: where its batches come from.
    workdir: the run folder.
    steps: how many updates.
    seed: of everything random.
    resume: go on from the newest checkpoint in `workdir`, if there is one.
    prepare: called with `seed` when all is checked and before parameters are
      read: it may train the checkpoint to begin with.
    plan: where and how finely stages run, as `planner.plan.of` reads it, or a
      file of such JSON or of what --plan_json wrote; None runs all on the first
      device.
    evaluate_every: updates between evaluations on held-out problems.
    until: end early once held-out accuracy is at least this.
    checkpoint_every: updates between checkpoints.
    keep: how many checkpoints to keep.
    export: `folder, params -> None`: writes the model at the end.
    wandb: project at Weights & Biases to send metrics to as well.
    only_plan: called with the flow of a step, the lag and the plan, instead of
      running anything.
  """
  folder = pathlib.Path(workdir)
  finished = finished_result(folder, steps, until, resume)
  if finished:
    return finished
  if only_plan:
    flows = trace_flows(workflow, source, seed)
    only_plan(flows[0], workflow.lag, read_plan(plan, *flows))
    config.refuse_unused()
    return None
  runtime = build(workflow, source, seed, plan)
  config.refuse_unused()
  folder.mkdir(parents=True, exist_ok=True)
  config.save(folder / 'config.gin')
  (folder / 'plan.json').write_text(runtime.plan.to_json())
  if prepare:
    prepare(seed=seed)
  checkpoints = checkpoint_lib.Checkpoints(folder / 'checkpoints', keep)
  with contextlib.closing(runtime), contextlib.ExitStack() as stack:
    saved = begin(runtime, workflow, source, seed, checkpoints, resume)
    notes = stack.enter_context(
      record.opened(folder, source, steps, saved.step, wandb)
    )
    notes.say(_header(folder, runtime, saved.step, steps))
    lag = workflow.lag
    loop = Loop(runtime, source, checkpoints, notes, seed, saved, lag)
    loop.run(folder, steps, evaluate_every, until, checkpoint_every)
    result = Result(folder, loop.steps, loop.seconds(), loop.metrics)
    if export:
      export(folder / 'model', workflow.params(runtime.state()))
    finish(result, notes.say)
  return result


def begin(runtime, workflow, source, seed, checkpoints, resume):
  """Loads what a run starts from: fresh parameters or its last checkpoint."""
  runtime.compile('step')  # While the parameters are read.
  with runtime.ambient():
    runtime.load(workflow.init(jax.random.key(seed)))
  saved = checkpoint_lib.Saved(0, None, source.init(seed), {})
  if resume and checkpoints.latest() is not None:
    saved = checkpoints.load(runtime.state(), saved.source)
    runtime.load(saved.state, saved.step)
  return saved


def finished_result(folder, steps, until, resume) -> Result | None:
  """The result of a run that is done already.

  Raises:
    FileExistsError: if `folder` holds a run that is not to be resumed.
  """
  if not resume and any(
    (folder / name).exists() for name in ('config.gin', 'metrics.jsonl')
  ):
    raise FileExistsError(
      f'{folder} already holds a run: add --resume to go on with it, or choose '
      'another --workdir.'
    )
  if not (folder / 'result.json').exists():
    return None
  old = json.loads((folder / 'result.json').read_text())
  reached = (
    until is not None and old['metrics'].get('eval/accuracy', 0.0) >= until
  )
  if old['steps'] < steps and not reached:
    return None
  print(f'{folder} is done: {old["steps"]} steps. See {folder}/report.html.')
  return Result(folder, old['steps'], old['seconds'], old['metrics'])


def trace_flows(workflow, source, seed) -> tuple[graph_lib.Flow, ...]:
  """The flows of a step and of an evaluation; computes nothing."""
  key = jax.random.key(seed)
  _, batch = source.next(source.init(seed), {})
  state = jax.eval_shape(workflow.init, key)
  step = flow_lib.trace(workflow.step, state, batch, key)
  evaluate = flow_lib.trace(
    lambda state, *inputs: (state, workflow.evaluate(state, *inputs)),
    state,
    source.held_out()[0],
    key,
  )
  return step, evaluate


def read_plan(plan, step, evaluate) -> plan_lib.Plan:
  """The plan that a recipe has in mind for two flows."""
  if isinstance(plan, str):
    plan = json.loads(pathlib.Path(plan).read_text())
    plan = plan.get('plan', plan)  # What --plan_json writes says more.
  return plan_lib.of(
    plan or {}, dict.fromkeys((*step.stages, *evaluate.stages))
  )


def build(workflow, source, seed, plan) -> local.Local:
  """Traces a workflow and makes its programs; computes nothing yet."""
  step, evaluate = trace_flows(workflow, source, seed)
  plan = read_plan(plan, step, evaluate)
  return local.Local(plan, step=step, evaluate=evaluate)


class Loop:
  """Where a run is: what must survive from step to step.

  Attributes:
    steps: updates finished.
    metrics: the last value of each.
  """

  def __init__(self, runtime, source, checkpoints, notes, seed, saved, lag):
    self._runtime, self._source, self._lag = runtime, source, lag
    self._checkpoints, self._notes = checkpoints, notes
    self._key = jax.random.key(seed)
    self._held_out = source.held_out()
    self._state = saved.source
    self.steps = self._begun = saved.step
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

  def run(self, folder, steps, evaluate_every, until, checkpoint_every):
    """Trains to the end; evaluates first, in between and last."""
    first = self.steps
    if not first:
      self.evaluate()
    while self.steps < steps and not self._reached(until):
      # What is evaluated or saved is a state at rest.
      rests = [n - self.steps % n for n in (evaluate_every, checkpoint_every)]
      rows = self.step(min(steps, self.steps + min(rests)))
      if self.steps == first + 1:
        config.save_operative(folder / 'operative_config.gin')
      last = self.steps == steps
      if last or self.steps % evaluate_every == 0:
        for name, shown in rows.items():
          self._notes.samples(self.steps, name.split('/')[0], shown)
        self.evaluate()
        last |= self._reached(until)
      if last or self.steps % checkpoint_every == 0:
        self.save()
    self._checkpoints.close()

  def seconds(self) -> float:
    """Since training began, time between a stop and its resumption apart."""
    return time.perf_counter() - self._began

  def _reached(self, accuracy):
    now = self.metrics.get('eval/accuracy', -math.inf)
    return accuracy is not None and now >= accuracy

  def _begin(self):
    """Begins the next step, while as many as the lag may not have ended."""
    # What the source is told does not depend on which of them have.
    told = self._known.get(self._begun - self._lag, {})
    self._state, batch = self._source.next(self._state, told)
    key = jax.random.fold_in(self._key, self._begun)
    self._flying.append(self._runtime.submit(batch, key))
    self._begun += 1

  def step(self, rest: int) -> dict[str, Any]:
    """One update; returns what it shows of its rows.

    Args:
      rest: the update after which no other may have been begun.
    """
    if not self._flying:
      self._last = time.perf_counter()
    while self._begun < min(rest, self.steps + 1 + self._lag):
      self._begin()
    info = self._flying.popleft().result()
    if not self._flying:
      self._runtime.wait()
    info = jax.device_get(info)
    seconds = time.perf_counter() - self._last
    self._last += seconds
    self._known[self.steps + 1] = self.metrics
    self._known.pop(self.steps - self._lag, None)
    self.steps += 1
    numbers, rows = metrics.read(info)
    spans = self._runtime.timeline.take(self.steps)
    numbers['time/step'] = seconds
    numbers['throughput/seconds'] = self.seconds()
    for stage, spent in timeline_lib.seconds(spans).items():
      numbers[f'time/{stage}'] = spent
    for name in ('rollout/tokens', 'train/tokens'):
      if name in numbers:
        numbers['throughput/tokens_per_second'] = numbers[name] / seconds
    self._notes.numbers(self.steps, numbers)
    self._notes.spans(self.steps, spans)
    self._learn(numbers)
    return rows

  def evaluate(self):
    """Asks all held-out problems."""
    start = time.perf_counter()
    infos = [
      jax.device_get(self._runtime.evaluate(batch, self._key))
      for batch in self._held_out
    ]
    self._runtime.timeline.take()  # They belong to no step.
    numbers, rows = metrics.read(functools.reduce(metrics.merge, infos))
    numbers['time/evaluate'] = time.perf_counter() - start
    self._notes.numbers(self.steps, numbers)
    for name, shown in rows.items():
      self._notes.samples(self.steps, name.split('/')[0], shown)
    self._learn(numbers)

  def save(self):
    self._checkpoints.save(
      checkpoint_lib.Saved(
        self.steps, self._runtime.state(), self._state, self._known
      )
    )


def _header(folder, runtime, start, steps) -> str:
  """What runs, and where."""
  carried = sum(x.nbytes for x in jax.tree.leaves(runtime.state()))
  facts = {
    'steps': f'{start} of {steps} done' if start else f'{steps}',
    'state': listing.size(carried),
    'places': _places(runtime.plan),
    'folder': str(folder),
  }
  stages = ' → '.join(runtime.lowered['step'].flow.stages)
  return console.header(f'Training: {stages}', facts)


def _places(plan) -> str:
  """Devices and mesh of every place."""
  kind = jax.devices()[0].device_kind
  said = []
  for name, place in plan.places.items():
    n = len(place.devices)
    axes = ' '.join(f'{axis}={size}' for axis, size in place.axes)
    said.append(f'{name}: {n} device{"s" * (n > 1)} {axes}'.rstrip())
  return f'{", ".join(said)} ({kind})'


def finish(result: Result, say: Callable[[str], None]):
  """Writes the report and, last of all, result.json."""
  from rlinf_jax import report  # It draws, and drawing is slow to import.

  done = {
    'steps': result.steps,
    'seconds': result.seconds,
    'metrics': {k: v for k, v in result.metrics.items() if math.isfinite(v)},
  }
  part = result.folder / 'result.json.part'
  part.write_text(json.dumps(done, indent=2))
  part.replace(result.folder / 'result.json')
  trace.write(result.folder)
  say(
    console.summary(
      result.folder, result.seconds, report.attempt(result.folder)
    )
  )
