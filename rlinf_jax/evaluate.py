"""`evaluate`: measures a policy on held-out problems, without training."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import numpy as np

from rlinf_jax import config
from rlinf_jax.planning import autoplan
from rlinf_jax.report import evaluation_table, report, video
from rlinf_jax.run import checkpoint, evaluation, run_lock, setup, writers
from rlinf_jax.run import flows as flows_lib
from rlinf_jax.runtime import base as runtime_base
from rlinf_jax.runtime.ray import launch
from stages import base
from stages.envs import video as env_video

PARTS = 'parts'  # Folder of finished batches' metrics; removed at the end.
SHOWN = 8  # Completions that the report shows.


def evaluate(
  workflow: base.Workflow,
  source: base.Source,
  *,
  workdir: str,
  recipe_of: Callable[..., Any] | None = None,
  checkpoint_of: str | None = None,
  resume: bool = False,
  seed: int = 0,
  plan: Mapping[str, Any] | str | None = None,
  ray_address: str | None = None,
  receive_timeout: float | None = None,
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
      evaluation with other settings is resumed.
  """
  folder = pathlib.Path(workdir)
  with run_lock.hold(folder):
    _check_folder(folder, resume)
    if (finished := folder / 'evaluation.json').exists():
      record = json.loads(finished.read_text())
      print(evaluation_table.text(record['sets']))
      return record
    if ray_address:
      launch.connect(ray_address)
    flows = flows_lib.trace_evaluation(workflow, source, seed)
    given_plan = flows_lib.read_plan(plan, flows)
    config.refuse_unused()
    if checkpoint_of:
      _check_checkpoint(checkpoint_of)
    _start_folder(folder)
    key = jax.random.key(seed)
    held_out = evaluation.HeldOut.of(source)
    load = functools.partial(_state, workflow, source, seed, checkpoint_of)
    state = None
    if given_plan is None:
      state = load()
      example = state, held_out.batches[0], key
      given_plan = autoplan.find_plan(flows, 0, example).plan
    runtime = setup.make_runtime(
      given_plan,
      flows=flows,
      train=recipe_of,
      folder=folder,
      use_ray=bool(ray_address),
      receive_timeout=receive_timeout,
      network_interface=network_interface,
      trace=flows_lib.trace_evaluation,
    )
    try:
      with runtime.ambient():
        state = load() if state is None else state
      runtime.load(state)
      return _run(folder, runtime, source, held_out, key, flows[0].gives)
    finally:
      runtime.close()


def _check_folder(folder: pathlib.Path, resume: bool):
  """Raises FileExistsError if the folder holds something else already."""
  names = 'config.gin', 'metrics.jsonl', 'evaluation.json'
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


def _check_checkpoint(run: str):
  """Raises FileNotFoundError if a run folder has no checkpoint."""
  folder = pathlib.Path(run) / 'checkpoints'
  if not folder.is_dir() or not _checkpoints(folder).latest():
    raise FileNotFoundError(
      f'{run} has no checkpoint to evaluate: give the --workdir of a run that '
      'has written one.'
    )


def _checkpoints(folder: pathlib.Path) -> checkpoint.Checkpoints:
  return checkpoint.Checkpoints(folder, keep=1, read_only=True)


def _start_folder(folder: pathlib.Path):
  """Makes the folder, with the recipe in it.

  Raises:
    ValueError: if it holds another recipe.
  """
  folder.mkdir(parents=True, exist_ok=True)
  earlier = folder / 'config.gin'
  if earlier.exists() and earlier.read_text() != config.text():
    raise ValueError(
      f'{folder} was begun with other bindings, see its config.gin: give the '
      'same, or choose another --workdir.'
    )
  config.save(earlier)
  (folder / PARTS).mkdir(exist_ok=True)


def _state(
  workflow: base.Workflow, source: base.Source, seed: int, run: str | None
):
  """The state to evaluate: a checkpoint's, or the first of a run."""
  batch = flows_lib.first_batch(source, seed)
  state = flows_lib.first_state(workflow, jax.random.key(seed), batch)
  if run:
    checkpoints = _checkpoints(pathlib.Path(run) / 'checkpoints')
    restored = checkpoints.load(state, source.init(seed))
    print(f'The checkpoint of step {restored.step} of {run} is evaluated.')
    state = restored.state
  return flows_lib.evaluated(workflow, source, state)


def _run(
  folder: pathlib.Path,
  runtime: runtime_base.Runtime,
  source: base.Source,
  held_out: evaluation.HeldOut,
  key: jax.Array,
  structure,
) -> dict[str, Any]:
  """Evaluates the batches that are left, and writes the results."""
  start, infos = time.perf_counter(), []
  (folder / 'samples.jsonl').unlink(missing_ok=True)
  samples = writers.json_lines(folder / 'samples.jsonl')
  with (
    contextlib.closing(samples),
    (folder / 'completions.jsonl').open('w', encoding='utf-8') as file,
  ):
    for i in range(len(held_out.batches)):
      part = folder / PARTS / f'{i:06}.npz'
      info = _read_part(part, structure)
      if info is None:
        info = evaluation.evaluate_batch(runtime, held_out, i, key)
        _write_part(part, info)
        print(
          f'{i + 1} of {len(held_out.batches)} batches are evaluated.',
          flush=True,
        )
      records = list(evaluation.completions(info, source, held_out, i))
      for record in records:
        file.write(json.dumps(record) + '\n')
      for record in records[: 0 if infos else SHOWN]:
        samples.write(0, {'split': 'eval', **record})
      infos.append(info)
  return _finish(folder, infos, held_out, time.perf_counter() - start)


def _write_part(path: pathlib.Path, info: base.Info):
  """Writes the metrics of a batch, atomically."""
  partial = path.with_suffix('.part')
  with partial.open('wb') as file:
    np.savez(file, *map(np.asarray, jax.tree.leaves(info)))
  partial.replace(path)


def _read_part(path: pathlib.Path, structure) -> base.Info | None:
  """Reads the metrics of a batch; None if it is still to be evaluated."""
  if not path.exists():
    return None
  with np.load(path) as arrays:
    leaves = [arrays[name] for name in arrays.files]
  return jax.tree.unflatten(structure, leaves)


def _finish(
  folder: pathlib.Path,
  infos: list[base.Info],
  held_out: evaluation.HeldOut,
  seconds: float,
) -> dict[str, Any]:
  """Writes the results of an evaluation and prints its table."""
  results = evaluation.results(infos, held_out.names)
  record = {'seconds': seconds, 'sets': results}
  part = folder / 'evaluation.json.part'
  part.write_text(json.dumps(record, indent=2))
  part.replace(folder / 'evaluation.json')
  values, rows = evaluation.summarize(infos, held_out.names)
  (folder / 'metrics.jsonl').unlink(missing_ok=True)
  log = writers.json_lines(folder / 'metrics.jsonl')
  log.write(0, values)
  log.close()
  if frames := rows.get(env_video.NAME):
    video.try_write(folder, 0, frames, print)
  if not (folder / 'completions.jsonl').stat().st_size:
    (folder / 'completions.jsonl').unlink()
  shutil.rmtree(folder / PARTS, ignore_errors=True)
  print(evaluation_table.text(results))
  print(f'{seconds:.1f} s. See {report.try_write(folder)}.', flush=True)
  return record
