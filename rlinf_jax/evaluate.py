"""`evaluate`: measures a policy on held-out problems, without training."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import json
import pathlib
import shutil
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from rlinf_jax.config import config
from rlinf_jax.planning import autoplan
from rlinf_jax.report import report, video
from rlinf_jax.report.html import evaluation_table
from rlinf_jax.run import evaluation, evaluation_files, setup
from rlinf_jax.run_files import checkpoint, evaluations, run_lock
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime import flows as flows_lib
from rlinf_jax.state import state_readers
from rlinf_jax.system import whole_file
from stages import base, ranges
from stages.envs.rollouts import video as env_video

PARTS = 'parts'  # Folder of finished batches' metrics; removed at the end.
EVALUATED = 'evaluated.json'  # The run, step and seed of an evaluation.


class _Part(NamedTuple):
  """The metrics of a held-out batch, and how long its evaluation took."""

  info: base.Info
  seconds: float


def evaluate(
  workflow: base.Workflow,
  source: base.Source,
  *,
  workdir: str,
  recipe_of: Callable[..., Any] | None = None,
  checkpoint_of: str | None = None,
  resume: bool = False,
  seed: ranges.NonNegativeInt = 0,
  plan: Mapping[str, Any] | str | None = None,
  ray_address: str | None = None,
  receive_timeout: ranges.PositiveFloat | None = None,
  network_interface: str | None = None,
) -> dict[str, Any]:
  """Evaluates the policy of a workflow on all held-out batches of a source.

  It writes evaluation.json, metrics.jsonl, report.html and, for a language
  model, completions.jsonl into `workdir`, and prints a table. Resuming a
  finished evaluation only prints its table.

  Args:
    workflow: the workflow whose initial policy is evaluated.
    source: the source whose held-out batches are used.
    workdir: the folder of the results.
    recipe_of: the function that the recipe configures, such as `train.train`;
      Ray processes read `workflow`, `source` and `seed` from its bindings.
    checkpoint_of: a run folder; its newest checkpoint is evaluated instead of
      the initial policy.
    resume: whether to continue in `workdir`, with the batches that are left.
    seed: seed of the parameters and of sampling.
    plan: as in `train.train`, for the stages of an evaluation.
    ray_address: as in `train.train`.
    receive_timeout: likewise.
    network_interface: likewise.

  Returns:
    The contents of evaluation.json.

  Raises:
    BlockingIOError: if another process runs in `workdir`.
    FileExistsError: if `workdir` is in use and `resume` is False.
    FileNotFoundError: if `checkpoint_of` has no checkpoint.
    ValueError: if the recipe binds a parameter that nothing reads, or an
      evaluation of something else, or with other bindings, is resumed.
  """
  with run_lock.hold(folder := pathlib.Path(workdir)):
    check_folder(folder, resume)
    subject = _subject(folder, checkpoint_of, seed)
    if (finished := folder / evaluations.SCORES).exists():
      record = json.loads(finished.read_text())
      print(evaluation_table.text(record['sets']))
      return record
    setup.connect(ray_address, plan)
    flows = flows_lib.trace_evaluation(workflow, source, seed)
    given_plan = flows_lib.read_plan(plan, flows, ignore_others=True)
    config.refuse_unused()
    _start_folder(folder, subject)
    key = jax.random.key(seed)
    held_out = evaluation.HeldOut.of(source)
    processes = {
      'train': recipe_of,
      'folder': folder,
      'use_ray': bool(ray_address),
    }
    first = setup.first_state_reader(
      workflow, source, seed, **processes, make=flows_lib.initial_evaluated
    )
    state = _state(workflow, source, seed, subject, first)
    processes |= {'flows': flows, 'trace': flows_lib.trace_evaluation}
    if given_plan is None:
      inputs = jax.tree.leaves((held_out.batches[0], key))
      measure = functools.partial(
        setup.measure, **processes, state=state, inputs=inputs
      )
      given_plan = autoplan.find_plan(flows, 0, measure).plan
    runtime = setup.make_runtime(
      given_plan,
      receive_timeout=receive_timeout,
      network_interface=network_interface,
      **processes,
    )
    try:
      runtime.start(state)
      if run := subject['run']:
        print(
          f'The checkpoint of step {subject["step"]} of {run} is evaluated.'
        )
      parts = _run(folder, runtime, source, held_out, key, flows[0].out_tree)
      return _finish(folder, parts, held_out, subject)
    finally:
      runtime.close()


def check_folder(folder: pathlib.Path, resume: bool):
  """Raises FileExistsError if an evaluation may not go into the folder."""
  names = 'config.gin', 'metrics.jsonl', evaluations.SCORES
  if not resume and any((folder / name).exists() for name in names):
    raise FileExistsError(
      f'{folder} already holds a run or an evaluation: add --resume to finish '
      'an evaluation, or choose another --workdir.'
    )
  if resume and (folder / 'checkpoints').exists():
    raise FileExistsError(
      f'{folder} holds a training run: choose another --workdir for its '
      f'evaluation, and name the run with --eval_checkpoint={folder}.'
    )


def _subject(
  folder: pathlib.Path, run: str | None, seed: int
) -> dict[str, Any]:
  """The run, its checkpoint's step and the seed that are evaluated.

  The step is the newest, or that with which the evaluation in the folder began.

  Raises:
    FileNotFoundError: if the run has no checkpoint, or no longer that with
      which the evaluation began.
    ValueError: if the folder holds an evaluation of something else, or one with
      other bindings.
  """
  subject = {'run': run and str(pathlib.Path(run).resolve()), 'seed': seed}
  file, recipe = folder / EVALUATED, folder / 'config.gin'
  began = json.loads(file.read_text()) if file.exists() else None
  if began and (
    began | {'step': None} != subject | {'step': None}
    or recipe.read_text() != config.text()
  ):
    raise ValueError(
      f'{folder} was begun with other bindings, another seed or another run, '
      f'see its config.gin and {EVALUATED}: give the same, or choose another '
      '--workdir.'
    )
  if run:
    with contextlib.closing(_checkpoints(run)) as saved:
      steps = saved.steps()
  else:
    steps = [None]
  step = began['step'] if began else max(steps, default=None)
  if run and step not in steps:
    raise FileNotFoundError(
      f'{run} has no checkpoint of step {step} to evaluate, only of {steps}: '
      'choose another --workdir for one of those.'
      if steps
      else f'{run} has no checkpoint to evaluate: give the --workdir of a run '
      'that has written one.'
    )
  return subject | {'step': step}


def _checkpoints(run: str) -> checkpoint.Checkpoints:
  """The checkpoints of a run, which may still be writing others.

  Raises:
    FileNotFoundError: if the run has never written one.
  """
  folder = pathlib.Path(run) / 'checkpoints'
  if not folder.is_dir():
    raise FileNotFoundError(
      f'{run} has no checkpoint to evaluate: give the --workdir of a run that '
      'has written one.'
    )
  return checkpoint.Checkpoints(folder, keep=1, read_only=True)


def _start_folder(folder: pathlib.Path, subject: dict[str, Any]):
  """Makes the folder, with the recipe and what is evaluated in it."""
  (folder / PARTS).mkdir(parents=True, exist_ok=True)
  config.save(folder / 'config.gin')
  whole_file.write_text(folder / EVALUATED, json.dumps(subject))


def _state(
  workflow: base.Workflow,
  source: base.Source,
  seed: int,
  subject: dict[str, Any],
  first: state_readers.FirstState,
) -> state_readers.StateReader:
  """Reads the state to evaluate: a checkpoint's, or the first of a run."""
  if not (run := subject['run']):
    return first
  shapes = jax.eval_shape(
    functools.partial(flows_lib.initial_state, workflow, source, seed)
  )
  with contextlib.closing(_checkpoints(run)) as saved:
    return saved.state(shapes, first, subject['step'])


def _run(
  folder: pathlib.Path,
  runtime: runtime_base.Runtime,
  source: base.Source,
  held_out: evaluation.HeldOut,
  key: jax.Array,
  structure,
) -> list[_Part]:
  """Evaluates the batches that are left; returns the metrics of all."""
  parts = []
  with evaluation_files.completions(folder, source, held_out) as write:
    for i in range(len(held_out.batches)):
      path = folder / PARTS / f'{i:06}.npz'
      part = _read_part(path, structure)
      if part is None:
        start = time.perf_counter()
        info = evaluation.evaluate_batch(runtime, held_out, i, key)
        part = _Part(info, time.perf_counter() - start)
        _write_part(path, part)
        print(
          f'{i + 1} of {len(held_out.batches)} batches are evaluated.',
          flush=True,
        )
      write(i, part.info)
      parts.append(part)
  return parts


def _write_part(path: pathlib.Path, part: _Part):
  """Writes the metrics of a batch, atomically."""
  leaves = map(np.asarray, jax.tree.leaves(part.info))
  with whole_file.replaced(path) as partial, partial.open('wb') as file:
    np.savez(file, part.seconds, *leaves)


def _read_part(path: pathlib.Path, structure) -> _Part | None:
  """Reads the metrics of a batch; None if it is still to be evaluated."""
  if not path.exists():
    return None
  with np.load(path) as arrays:
    seconds, *leaves = (arrays[name] for name in arrays.files)
  return _Part(jax.tree.unflatten(structure, leaves), float(seconds))


def _finish(
  folder: pathlib.Path,
  parts: list[_Part],
  held_out: evaluation.HeldOut,
  subject: dict[str, Any],
) -> dict[str, Any]:
  """Writes the results of an evaluation and prints its table."""
  infos = [part.info for part in parts]
  seconds = sum(part.seconds for part in parts)
  values, rows = evaluation.summarize(infos, held_out.names)
  values[evaluation.SECONDS] = seconds
  if frames := rows.get(env_video.NAME):
    video.try_write(folder, 0, frames, print)
  record = evaluation_files.write_scores(
    folder, values, infos, held_out, subject
  )
  shutil.rmtree(folder / PARTS, ignore_errors=True)
  print(evaluation_table.text(record['sets']))
  print(f'{seconds:.1f} s. See {report.try_write(folder)}.', flush=True)
  return record
