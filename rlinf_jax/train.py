"""`train`: the entry point of a training run, which a gin file configures."""

from collections.abc import Mapping
import functools
import pathlib
from typing import Any, Protocol

from rlinf_jax.config import config, config_changes
from rlinf_jax.run import loop, setup, supervise
from rlinf_jax.run_files import checkpoint, result, run_lock
from rlinf_jax.runtime import flows as flows_lib
from stages import base, ranges


class Pretrain(Protocol):
  """A function that may train the checkpoint from which a run starts."""

  def __call__(self, *, seed: int) -> None: ...


class Export(Protocol):
  """A function that writes a trained model into a folder."""

  def __call__(self, folder: pathlib.Path, params: base.Params) -> None: ...


def train(
  workflow: base.Workflow,
  source: base.Source,
  *,
  workdir: str,
  steps: ranges.NonNegativeInt,
  seed: ranges.NonNegativeInt = 0,
  resume: bool = False,
  pretrain: Pretrain | None = None,
  plan: Mapping[str, Any] | str | None = flows_lib.AUTO,
  evaluate_every: ranges.NonNegativeInt = 20,
  stop_at_score: float | None = None,
  video_every_evals: ranges.NonNegativeInt = 4,
  max_skipped_steps: ranges.PositiveInt = 10,
  checkpoint_every: ranges.PositiveInt = 50,
  keep_checkpoints: ranges.PositiveInt = 2,
  keep_completions: ranges.NonNegativeInt = 20,
  profile_step: ranges.NonNegativeInt = 0,
  export: Export | None = None,
  wandb_project: str | None = None,
  ray_address: str | None = None,
  receive_timeout: ranges.PositiveFloat | None = None,
  network_interface: str | None = None,
) -> result.Result:
  """Trains a workflow and writes a run folder.

  Args:
    workflow: the workflow to run.
    source: the batches to train on, and those to evaluate on.
    workdir: the run folder.
    steps: steps of the whole run, each with one batch of `source`.
    seed: seed of everything random.
    resume: continues from the newest checkpoint in `workdir`, if there is one.
    pretrain: called with `seed` after all checks and before parameters are
      read; it may train the checkpoint from which the run starts.
    plan: where and how finely stages run. 'auto' measures the stages, searches
      for the fastest plan, and searches again when steps do not take as long
      as predicted. Otherwise a plan as `planner.ir.plan.parse` reads it, or the
      path of its JSON or of the JSON that --plan_json writes. None runs every
      stage on the first device.
    evaluate_every: steps between evaluations on held-out problems, of which
      one is before the first step and one at the end. 0 for none at all.
    stop_at_score: ends the run early once the workflow's score reaches this.
    video_every_evals: evaluations between videos, where an environment can be
      drawn; the first and the last always leave one. 0 for none.
    max_skipped_steps: steps in a row, all of whose updates are skipped because
      their gradient is not finite, after which the run ends with an error.
    checkpoint_every: steps between checkpoints.
    keep_checkpoints: number of checkpoints to keep.
    keep_completions: evaluations whose completions are kept, the newest, in
      `workdir/evaluations`; 0 for none. All scores are kept.
    profile_step: step that JAX's profiler records into `workdir/profile`, for
      XProf or TensorBoard; 0 for none. The first step compiles, so take a
      later one. With staleness, parts of later steps are in it. Processes of
      Ray are not recorded.
    export: `folder, params -> None`: writes the model at the end.
    wandb_project: project at Weights & Biases to send metrics to as well.
    ray_address: runs places in processes of Ray: 'local' starts Ray on this
      machine, 'auto' or an address joins a cluster. None runs all places in
      this process. With plan 'auto', stages are measured in such a process.
    receive_timeout: seconds for which a Ray process waits for a value of
      another before the run fails with an error; None waits without limit.
    network_interface: name of the interface, such as 'eth1', on which Ray
      processes listen for each other. None is the narrowest: the loopback
      interface if all of them are on one machine, else the one that Ray uses.

  Raises:
    BlockingIOError: if another process runs in `workdir`.
    FileExistsError: if `workdir` holds a run and `resume` is False.
    ValueError: if the recipe binds a parameter that nothing reads, no plan
      fits in memory, or a run is resumed with settings that cannot change.
  """
  schedule = loop.Schedule(
    steps=steps,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
    stop_at_score=stop_at_score,
    video_every_evals=video_every_evals,
    max_skipped_steps=max_skipped_steps,
    profile_step=profile_step,
    keep_completions=keep_completions,
  )
  with run_lock.hold(folder := pathlib.Path(workdir)):
    changes = config_changes.since_start(folder) if resume else []
    if finished := result.read_finished(
      folder, steps, stop_at_score, score=workflow.score, resume=resume
    ):
      return finished
    config_changes.show(changes)
    setup.connect(ray_address, plan)
    flows = flows_lib.trace_flows(workflow, source, seed)
    processes = {'train': train, 'folder': folder, 'use_ray': bool(ray_address)}
    make_runtime = functools.partial(
      setup.make_runtime,
      **processes,
      flows=flows,
      receive_timeout=receive_timeout,
      network_interface=network_interface,
      retrace=functools.partial(flows_lib.trace_step, workflow),
    )
    given_plan = flows_lib.read_plan(plan, flows)
    runtime = make_runtime(given_plan) if given_plan else None
    config.refuse_unused()
    config.save(folder / 'config.gin')
    if pretrain:
      pretrain(seed=seed)
    first = setup.first_state_reader(workflow, source, seed, **processes)
    runtime, monitor = setup.prepare_runtime(
      workflow,
      source,
      seed,
      **processes,
      flows=flows,
      first=first,
      runtime=runtime,
      make_runtime=make_runtime,
    )
    saver = checkpoint.Checkpoints(folder / 'checkpoints', keep_checkpoints)
    run = supervise.Run(
      workflow=workflow,
      source=source,
      seed=seed,
      folder=folder,
      schedule=schedule,
      checkpoints=saver,
      runtime=runtime,
      first=first,
      monitor=monitor,
      resume=resume,
      wandb_project=wandb_project,
      export=export,
    )
    return supervise.run_to_end(run)
