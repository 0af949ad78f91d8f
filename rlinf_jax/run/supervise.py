"""Trains to the end of a run, restarted from a checkpoint if a process dies."""

import collections
from collections.abc import Callable
import contextlib
import dataclasses
import functools
import pathlib

import jax

from planner import formatting
from planner.ir import plan as plan_lib
from rlinf_jax.planning import monitor as monitor_lib
from rlinf_jax.report import trace
from rlinf_jax.run import console, interrupt, run_log, setup
from rlinf_jax.run import loop as loop_lib
from rlinf_jax.run_files import checkpoint as checkpoint_lib
from rlinf_jax.run_files import result
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime import flows, programs
from rlinf_jax.state import file_arrays, state_readers
from stages import base

ATTEMPTS = 3  # From one checkpoint, before the run fails.


@dataclasses.dataclass
class Run:
  """Everything that an attempt to finish a run needs.

  Attributes:
    workflow: the workflow to run.
    source: its batches.
    seed: of everything random.
    folder: the run folder.
    schedule: when to evaluate, save and end.
    checkpoints: of the run.
    runtime: without a state; replaced if the plan changes.
    first: reads the state before the first step.
    monitor: of a plan that was searched for, else None.
    resume: whether to start from the newest checkpoint.
    wandb_project: project at Weights & Biases, if metrics go there.
    export: `folder, params -> None`: writes the model at the end.
  """

  workflow: base.Workflow
  source: base.Source
  seed: int
  folder: pathlib.Path
  schedule: loop_lib.Schedule
  checkpoints: checkpoint_lib.Checkpoints
  runtime: runtime_base.Runtime
  first: state_readers.FirstState
  monitor: monitor_lib.PlanMonitor | None
  resume: bool
  wandb_project: str | None
  export: Callable[..., None] | None


def run_to_end(run: Run) -> result.Result:
  """Trains until the run is finished.

  Raises:
    CheckpointError: if a checkpoint cannot be written.
    ProcessDiedError: if processes die `ATTEMPTS` times in a row after the same
      checkpoint.
    KeyboardInterrupt: if the run was asked to stop.
  """
  failures = collections.Counter()  # By step of the checkpoint.
  stop = interrupt.Interrupt()
  while True:
    try:
      return _attempt(run, stop, resume=bool(run.resume or failures))
    except runtime_base.ProcessDiedError as error:
      try:
        run.checkpoints.abandon()  # It may have died while it wrote one.
      except checkpoint_lib.CheckpointError:
        run.runtime.close()
        raise
      if stop.requested:  # A scheduler ends all processes of a job.
        run.runtime.close()
        raise KeyboardInterrupt from error
      step = run.checkpoints.latest() or 0
      failures[step] += 1
      if failures[step] == ATTEMPTS:
        run.runtime.close()
        raise
      print(f'{error} The run continues from step {step}.', flush=True)


def _attempt(
  run: Run, stop: interrupt.Interrupt, resume: bool
) -> result.Result:
  """Trains from the newest checkpoint, or from the first state, to the end."""
  with contextlib.ExitStack() as stack:
    start = setup.start_runtime(
      run.runtime, run.first, run.source, run.seed, run.checkpoints, resume
    )
    steps = run.schedule.steps
    log = stack.enter_context(
      run_log.RunLog(
        run.folder, run.source, steps, start.step, run.wandb_project
      )
    )
    result.remove(run.folder)
    log.write_plan(run.runtime.plan)
    if run.monitor:
      log.write_prediction(start.step, run.monitor.chosen.prediction)
    log.print(_header(run.folder, run.runtime, start.step, steps))
    loop = stack.enter_context(
      loop_lib.Loop(
        runtime=run.runtime,
        workflow=run.workflow,
        source=run.source,
        checkpoints=run.checkpoints,
        log=log,
        seed=run.seed,
        first=run.first,
        start=start,
        stop=stop,
        monitor=run.monitor,
      )
    )
    try:
      loop.run(run.folder, run.schedule)
    finally:
      run.runtime = loop.runtime  # The plan may have changed.
    for line in _transfers(loop.runtime):
      log.print(line)
    outcome = result.Result(
      run.folder, loop.steps, loop.seconds(), loop.metrics
    )
    if run.export:
      run.export(run.folder / 'model', _params(run, loop.runtime))
    _finish(outcome, log)
  return outcome


def _params(run: Run, runtime: runtime_base.Runtime):
  """The trained parameters, of which the export reads one after the other."""
  shapes = programs.state_shapes(runtime.lowered['step'].flow)
  # Of this process: that of a run with Ray would read the recipe once more.
  state = first = state_readers.RepeatedReader(
    state_readers.FirstState(
      functools.partial(flows.initial_state, run.workflow, run.source, run.seed)
    )
  )
  # Those of the run were closed when training ended.
  saved = checkpoint_lib.Checkpoints(
    run.checkpoints.folder, keep=1, read_only=True
  )
  with contextlib.closing(saved):
    if saved.latest() is not None:
      state = saved.state(shapes, first)
  return run.workflow.params(file_arrays.of_state(state, shapes))


def _finish(outcome: result.Result, log: run_log.RunLog):
  """Writes result.json, the trace and the report; prints a summary."""
  from rlinf_jax.report import report  # Slow to import: it draws charts.

  outcome.write()
  trace.write(outcome.folder)
  page = report.try_write(outcome.folder)
  log.print(console.format_summary(outcome.folder, outcome.seconds, page))


def _transfers(runtime: runtime_base.Runtime) -> list[str]:
  """A line for each pair of places: bytes sent, seconds and bandwidth."""
  return [
    f'Sent from {source} to {target}: {formatting.byte_size(size)} in '
    f'{seconds:.2f} s '
    f'({formatting.byte_size(size / seconds)}/s).'
    for (source, target), (size, seconds) in runtime.moved().items()
  ]


def _header(
  folder: pathlib.Path, runtime: runtime_base.Runtime, start: int, steps: int
) -> str:
  """The lines printed when training starts: what runs, and where."""
  lowered = runtime.lowered['step']
  values = (lowered.flow.values[start] for start, _ in lowered.flow.carry)
  state_bytes = sum(value.bytes for value in values)
  facts = {
    'stages': ' → '.join(lowered.flow.stages),
    'steps': f'{steps}, resumed after {start}' if start else f'{steps}',
    'state': formatting.byte_size(state_bytes),
    'devices': _devices(runtime.plan),
    'folder': str(folder),
  }
  attention = flows.attention(lowered.flow, jax.default_backend())
  facts |= {'attention': attention} if attention else {}
  if len(runtime.plan.places) > 1:
    facts['transfers'] = ', '.join(
      f'{source} → {target} {formatting.byte_size(size)} {how}'
      for source, target, how, size in programs.traffic(
        lowered, runtime.transport
      )
    )
  return console.format_facts('Training', facts)


def _devices(plan: plan_lib.Plan) -> str:
  """Device kind, and the devices, mesh and processes of every place."""
  kind = jax.devices()[0].device_kind
  places = [
    f'{name}: {place}{", shared" * (name in plan.shared_devices)}'
    for name, place in plan.places.items()
  ]
  return f'{"; ".join(places)} ({kind})'
