"""A run that has ended goes on with more steps."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax import train
from rlinf_jax.report import report
from rlinf_jax.run_files import run_folder
import stages
from stages import base, metrics, source_files


@stages.stage('learn', 'batch')
def learn(state, x_B):
  return state + x_B.sum(), {'train/loss': metrics.mean(x_B)}


@stages.stage('score', 'batch')
def score(state, x_B, key):
  return {'eval/loss': metrics.mean(state * x_B)}


WORKFLOW = base.Workflow(
  lambda key: jnp.zeros(()),
  lambda state, x_B, key: learn(state, x_B),
  score,
  lambda state: state,
)


def next_batch(state, numbers):
  return state + 1, np.full(4, state, np.float32)


SOURCE = base.Source(
  lambda seed: np.array(0), next_batch, lambda: [np.ones(4, np.float32)]
)


def run(folder, steps, source=SOURCE, **kwargs):
  kwargs = {'evaluate_every': 0, 'checkpoint_every': 1, 'plan': None} | kwargs
  train.train(WORKFLOW, source, workdir=str(folder), steps=steps, **kwargs)


def fail_at_the_fourth_batch(state, numbers):
  if state == 3:
    raise MemoryError('killed')
  return next_batch(state, numbers)


@pytest.fixture(scope='module')
def longer(tmp_path_factory):
  """A run of two steps that goes on to five, and dies after three."""
  folder = tmp_path_factory.mktemp('longer')
  run(folder, 2)
  with pytest.raises(MemoryError):
    dying = SOURCE._replace(next=fail_at_the_fourth_batch)
    run(folder, 5, dying, resume=True)
  return folder


def test_a_run_that_went_on_and_died_is_not_finished(longer):
  assert not (longer / 'result.json').exists()
  found = run_folder.read(longer)
  assert run_folder.steps(found) == 3 and found.result is None
  assert 'The run is not finished' in report.write(longer).read_text()


def test_the_clock_of_a_resumed_run_goes_on(longer):
  text = (longer / 'timeline.jsonl').read_text().splitlines()
  by_step = itertools.groupby(map(json.loads, text), lambda x: x['step'])
  spans = {
    step: (min(x['start'] for x in mine), max(x['end'] for x in mine))
    for step, records in by_step
    for mine in [list(records)]
  }
  assert [*spans] == [1, 2, 3]
  for (_, end), (start, _) in itertools.pairwise(spans.values()):
    assert end <= start


def recognized(*digests):
  """The source, of files with these digests."""
  paths = [f'{x}.jsonl' for x in digests]
  files = source_files.Files(paths, np.array(digests))
  return SOURCE._replace(
    init=lambda seed: {'at': np.array(0)} | source_files.entries(files, files),
    next=lambda state, numbers: (
      state | {'at': state['at'] + 1},
      np.ones(4, np.float32),
    ),
    check=source_files.checker(files, files),
  )


def test_other_files_are_refused_before_anything_is_evaluated(tmp_path):
  folder = tmp_path / 'run'
  run(folder, 1, recognized(1, 2))
  before = (folder / 'metrics.jsonl').read_text()
  for other in (recognized(1, 3), recognized(1)):
    with pytest.raises(ValueError, match='or choose another --workdir'):
      run(folder, 2, other, evaluate_every=1, resume=True)
  assert (folder / 'metrics.jsonl').read_text() == before
  run(folder, 2, recognized(1, 2), resume=True)


def test_the_seconds_of_the_last_evaluation_are_counted(tmp_path):
  folder = tmp_path / 'run'
  run(folder, 2, evaluate_every=2)
  metrics = folder / 'metrics.jsonl'
  *before, evaluation = map(json.loads, metrics.read_text().splitlines())
  evaluation['time/evaluate'] += 1e6
  lines = map(json.dumps, [*before, evaluation])
  metrics.write_text('\n'.join(lines) + '\n')
  run(folder, 3, evaluate_every=2, resume=True)
  series = run_folder.read(folder).series['throughput/seconds']
  assert series.step.tolist() == [1, 2, 3]
  assert series.value[1] < 1e6 < series.value[2] < 2e6
