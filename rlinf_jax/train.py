"""The training loop."""

import collections
from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax

from planner.costs import cost as cost_lib
from planner.explain import listing
from planner.ir import flow as flow_lib
from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from rlinf_jax import config
from rlinf_jax.planning import autoplan, stage_profile
from rlinf_jax.report import trace
from rlinf_jax.run import checkpoint as checkpoint_lib
from rlinf_jax.run import console, run_log
from rlinf_jax.run import loop as loop_lib
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime import local, programs
from rlinf_jax.runtime.ray import launch
from stages import base

AUTO = 'auto'
ATTEMPTS = 3  # From one checkpoint, if processes of places die.


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
  pretrain: Callable[..., Any] | None = None,
  plan: Mapping[str, Any] | str | None = AUTO,
  evaluate_every: int = 20,
  stop_at_score: float | None = None,
  video_every_evals: int = 4,
  checkpoint_every: int = 50,
  keep_checkpoints: int = 2,
  export: Callable[..., None] | None = None,
  wandb_project: str | None = None,
  ray_address: str | None = None,
  receive_timeout: float | None = None,
  instead: Callable[..., Any] | None = None,
) -> Any:
  """Runs a workflow to its end and leaves a run folder behind.

  Args:
    workflow: what to run.
    source: where its batches come from.
    workdir: the run folder.
    steps: how many updates.
    seed: of everything random.
    resume: go on from the newest checkpoint in `workdir`, if there is one.
    pretrain: called with `seed` when all is checked and before parameters are
      read: it may train the checkpoint to begin with.
    plan: where and how finely stages run: 'auto' measures them and searches,
      and searches again when steps are not as predicted. Else a plan as
      `planner.ir.plan.parse` reads it, or a file of such JSON or of what
      --plan_json wrote; None runs all on the first device.
    evaluate_every: updates between evaluations on held-out problems.
    stop_at_score: ends the run early once the workflow's score reaches this.
    video_every_evals: evaluations between videos, where an environment can be
      drawn; the first and the last always leave one. 0 for none.
    checkpoint_every: updates between checkpoints.
    keep_checkpoints: number of checkpoints to keep.
    export: `folder, params -> None`: writes the model at the end.
    wandb_project: project at Weights & Biases to send metrics to as well.
    ray_address: runs places in processes of Ray: 'local' starts Ray on this
      machine, 'auto' or an address joins a cluster. None runs all places in
      this process. With plan 'auto', stages are measured in this process.
    receive_timeout: seconds for which a Ray process waits for a value of
      another before the run fails with an error; None waits without limit.
    instead: called with the flows, the lag and the plan, instead of running
      anything.

  Returns:
    The `Result`, or what `instead` returns.
  """
  folder = pathlib.Path(workdir)
  if instead:
    flows = trace_flows(workflow, source, seed)
    own = None if plan == AUTO else read_plan(plan, *flows)
    made = instead(flows, workflow.staleness, own)
    config.refuse_unused()
    return made
  finished = finished_result(
    folder, steps, stop_at_score, resume, workflow.score
  )
  if finished:
    return finished
  if ray_address:
    launch.connect(ray_address)
  flows = trace_flows(workflow, source, seed)
  settle = functools.partial(
    place,
    flows=flows,
    folder=folder,
    ray=ray_address,
    receive_timeout=receive_timeout,
  )
  if ray_address and plan == AUTO:
    launch.check_measurable()
  runtime = None if plan == AUTO else settle(read_plan(plan, *flows))
  config.refuse_unused()
  folder.mkdir(parents=True, exist_ok=True)
  config.save(folder / 'config.gin')
  if pretrain:
    pretrain(seed=seed)
  checkpoints = checkpoint_lib.Checkpoints(
    folder / 'checkpoints', keep_checkpoints
  )
  kept = folder / 'plan.json'
  kept = read_plan(str(kept), *flows) if kept.exists() else None
  runtime, watch = begin(workflow, source, seed, flows, runtime, settle, kept)
  job = _Job(workflow, source, seed, checkpoints, runtime, watch, folder)
  return _to_the_end(
    *(job, steps, resume, wandb_project),
    lambda loop: loop.run(
      *(
        folder,
        steps,
        evaluate_every,
        stop_at_score,
        checkpoint_every,
        video_every_evals,
      )
    ),
    export,
  )


@dataclasses.dataclass
class _Job:
  """What an attempt to finish a run needs."""

  workflow: base.Workflow
  source: base.Source
  seed: int
  checkpoints: checkpoint_lib.Checkpoints
  runtime: Any
  watch: autoplan.Watch | None
  folder: pathlib.Path


def _to_the_end(job, steps, resume, wandb, run, export) -> Result:
  """Runs until it is done, though processes die on the way."""
  died = collections.Counter()  # By the checkpoint that was gone on from.
  while True:
    try:
      if died:
        batch = first_batch(job.source, job.seed)
        key = jax.random.key(job.seed)
        job.runtime.load(first_state(job.workflow, key, batch))
      return _attempt(job, steps, resume or died, wandb, run, export)
    except runtime_base.ProcessDiedError as error:
      since = job.checkpoints.latest() or 0
      died[since] += 1
      if died[since] == ATTEMPTS:
        job.runtime.close()
        raise
      print(f'{error} The run goes on from step {since}.', flush=True)


def _attempt(job, steps, resume, wandb, run, export) -> Result:
  """Runs from the last checkpoint, or from the beginning, to the end."""
  runtime, folder = job.runtime, job.folder
  start = job.source.init(job.seed)
  with contextlib.ExitStack() as stack:
    saved = restore(runtime, start, job.checkpoints, resume)
    notes = stack.enter_context(
      run_log.opened(folder, job.source, steps, saved.step, wandb)
    )
    notes.plan(runtime.plan)
    if job.watch:
      notes.prediction(saved.step, job.watch.chosen.prediction)
    notes.say(_header(folder, runtime, saved.step, steps))
    loop = stack.enter_context(
      loop_lib.Loop(
        *(runtime, job.workflow, job.source, job.checkpoints, notes),
        *(job.seed, saved, job.watch),
      )
    )
    try:
      run(loop)
    finally:
      job.runtime = loop.runtime  # Of another plan, it may be.
    for (source, target), (size, spent) in loop.runtime.moved().items():
      notes.say(
        f'Sent from {source} to {target}: {listing.size(size)} in '
        f'{spent:.2f} s, {listing.size(size / spent)} a second.'
      )
    result = Result(folder, loop.steps, loop.seconds(), loop.metrics)
    if export:
      export(folder / 'model', job.workflow.params(loop.runtime.state()))
    finish(result, notes.say)
  return result


def begin(workflow, source, seed, flows, runtime, settle, kept):
  """Reads parameters into the places of a plan, and finds one if need be.

  Args:
    workflow: what runs.
    source: whose first batch stages are measured with.
    seed: of the parameters and of that batch.
    flows: of a step and of an evaluation.
    runtime: the places, or None where the plan is to be found.
    settle: `plan, cost -> places`.
    kept: the plan to go on with, where one was found before.

  Returns:
    The places, and what watches a plan that was found.
  """
  key, watch, given = jax.random.key(seed), None, None
  batch = first_batch(source, seed)
  if not runtime:
    if stage_profile.fits(flows[0]):
      given = first_state(workflow, key, batch), batch, key
    watch = autoplan.choose(flows, workflow.staleness, given, settle, kept)
    runtime = watch.runtime()
  runtime.compile('step')  # While the parameters are read.
  if any(map(stage_profile.uses_up, flows[0].nodes)):
    given = None  # Simulators have gone on while they were measured.
  with runtime.ambient():
    state = given[0] if given else first_state(workflow, key, batch)
  # Outside of it: places lie elsewhere than where checkpoints are read to.
  runtime.load(state)
  return runtime, watch


def first_batch(source, seed) -> Any:
  """What a run's first step is given."""
  return source.next(source.init(seed), {})[1]


def first_state(workflow, key, batch) -> Any:
  """The state that a run begins with, of steps of such batches."""
  state = workflow.init(key)
  return workflow.allocate(state, batch) if workflow.allocate else state


def restore(runtime, start, checkpoints, resume) -> checkpoint_lib.Saved:
  """What a run starts from: its parameters as read, or its last checkpoint."""
  saved = checkpoint_lib.Saved(0, None, start, {})
  if resume and checkpoints.latest() is not None:
    saved = checkpoints.load(runtime.state(), saved.source)
    runtime.load(saved.state, saved.step)
  return saved


def finished_result(folder, steps, until, resume, score) -> Result | None:
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
  reached = until is not None and old['metrics'].get(score, 0.0) >= until
  if old['steps'] < steps and not reached:
    return None
  print(f'{folder} is done: {old["steps"]} steps. See {folder}/report.html.')
  return Result(folder, old['steps'], old['seconds'], old['metrics'])


def trace_flows(workflow, source, seed) -> tuple[graph_lib.Flow, ...]:
  """The flows of a step and of an evaluation; computes nothing."""
  key, batch = jax.random.key(seed), first_batch(source, seed)
  state = jax.eval_shape(
    functools.partial(first_state, workflow, batch=batch), key
  )
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
  return plan_lib.parse(
    plan or {}, dict.fromkeys((*step.stages, *evaluate.stages))
  )


def place(plan, cost=cost_lib.EQUAL, *, flows, folder, ray, receive_timeout):
  """The places of a plan, as threads or processes; computes nothing yet.

  Which of several stages goes first where they could, is a matter of their cost
  among threads alone: processes find the same order without being told.
  """
  step, evaluate = flows
  if ray:
    return launch.runtime(plan, flows, train, folder, receive_timeout)
  return local.LocalRuntime(plan, step=step, evaluate=evaluate, cost=cost)


def _header(folder, runtime, start, steps) -> str:
  """What runs, and where."""
  carried = sum(x.nbytes for x in jax.tree.leaves(runtime.state()))
  facts = {
    'steps': f'{start} of {steps} done' if start else f'{steps}',
    'state': listing.size(carried),
    'places': _places(runtime.plan),
    'folder': str(folder),
  }
  lowered = runtime.lowered['step']
  if len(runtime.plan.places) > 1:
    facts['links'] = ', '.join(
      f'{source} → {target} {listing.size(size)} {how}'
      for source, target, how, size in programs.traffic(
        lowered, runtime.transport
      )
    )
  stages = ' → '.join(lowered.flow.stages)
  return console.header(f'Training: {stages}', facts)


def _places(plan) -> str:
  """Devices, mesh and processes of every place."""
  kind = jax.devices()[0].device_kind
  said = [
    f'{name}: {place}{", shared" * (name in plan.shared_devices)}'
    for name, place in plan.places.items()
  ]
  return f'{"; ".join(said)} ({kind})'


def finish(result: Result, say: Callable[[str], None]):
  """Writes the report and, last of all, result.json."""
  from rlinf_jax.report import (
    report,  # It draws, and drawing is slow to import.
  )

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
