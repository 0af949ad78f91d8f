"""An interrupt waits for no evaluation, which the resumed run makes."""

import json
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax import train
from rlinf_jax.run import evaluation, loop
import saved
import stages
from stages import base, metrics

STEPS, EVERY, BATCHES = 5, 2, 3


@stages.stage('learn', 'batch')
def learn(state, x_B):
  w = 0.9 * state['w'] + jnp.sin(x_B.sum())
  return {'w': w}, {'train/loss': metrics.mean(w)}


@stages.stage('score', 'batch')
def score(state, x_B, key):
  noise = jax.random.normal(key)
  return {'eval/loss': metrics.mean(state['w'] * x_B + noise)}


WORKFLOW = base.Workflow(
  lambda key: {'w': jnp.ones(())},
  lambda state, x_B, key: learn(state, x_B),
  score,
  lambda state: state,
)


def next_batch(state, numbers):
  """A curriculum, which reads the metrics of the last evaluation."""
  i = state['i'] + 1
  x_B = np.arange(4, dtype=np.float32) * i + numbers.get('eval/loss', 0.0)
  return {'i': i}, x_B.astype(np.float32)


SOURCE = base.Source(
  lambda seed: {'i': np.array(0)},
  next_batch,
  lambda: [np.full(4, i, np.float32) for i in range(BATCHES)],
)


def run(folder, source=SOURCE, **kwargs):
  return train.train(
    WORKFLOW,
    source,
    workdir=str(folder),
    steps=STEPS,
    evaluate_every=EVERY,
    checkpoint_every=STEPS,
    plan=None,
    **kwargs,
  )


def lines(folder):
  """The metrics of a run that are not about time."""
  text = (folder / 'metrics.jsonl').read_text().splitlines()
  kept = 'step', 'train/loss', 'eval/loss'
  return [
    {name: x for name, x in json.loads(line).items() if name in kept}
    for line in text
  ]


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  folder = tmp_path_factory.mktemp('straight') / 'run'
  run(folder)
  found = lines(folder)
  assert [x['step'] for x in found] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
  assert sorted(scores(folder)) == [f'step_{n:06}' for n in (0, 2, 4, 5)]
  return folder


def scores(folder):
  """The scores of each evaluation, by the name of its folder."""
  return {
    x.parent.name: json.loads(x.read_text())['sets']
    for x in folder.glob('evaluations/*/evaluation.json')
  }


def assert_same(folder, straight):
  assert lines(folder) == lines(straight)
  assert scores(folder) == scores(straight)
  mine, theirs = (saved.arrays(x, STEPS) for x in (folder, straight))
  jax.tree.map(np.testing.assert_array_equal, mine, theirs)
  result, wanted = (
    json.loads((x / 'result.json').read_text())['metrics']
    for x in (folder, straight)
  )
  assert result['eval/loss'] == wanted['eval/loss']


@pytest.fixture
def evaluated(monkeypatch):
  """Numbers of the batches that are evaluated; a signal comes with the nth."""
  real = evaluation.evaluate_batch
  calls = types.SimpleNamespace(made=[], signal_at=None)

  def evaluate_batch(runtime, held_out, i, key):
    if len(calls.made) == calls.signal_at:
      os.kill(os.getpid(), signal.SIGTERM)
    calls.made.append(i)
    return real(runtime, held_out, i, key)

  monkeypatch.setattr(evaluation, 'evaluate_batch', evaluate_batch)
  return calls


@pytest.mark.parametrize(
  ('at', 'step'), [(1, None), (BATCHES, 2), (3 * BATCHES + 1, STEPS)]
)
def test_an_evaluation_that_is_interrupted_is_made_after_a_resumption(
  evaluated, straight, tmp_path, at, step
):
  """The first evaluation, that after step 2, and the last."""
  evaluated.signal_at = at
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path)
  assert len(evaluated.made) == at + 1  # The batch under way, and no more.
  checkpoints = [int(x.name) for x in (tmp_path / 'checkpoints').iterdir()]
  assert checkpoints == ([step] if step else [])
  assert not (tmp_path / 'result.json').exists()
  if step:
    last = lines(tmp_path)[-1]
    assert last['step'] == step and 'eval/loss' not in last
  evaluated.signal_at = None
  run(tmp_path, resume=True)
  assert_same(tmp_path, straight)


def test_an_interrupt_in_a_step_skips_the_evaluation_after_it(
  evaluated, straight, tmp_path
):
  def next_and_stop(state, numbers):
    if state['i'] == EVERY - 1:
      os.kill(os.getpid(), signal.SIGINT)
    return next_batch(state, numbers)

  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, SOURCE._replace(next=next_and_stop))
  assert len(evaluated.made) == BATCHES  # Those before the first step.
  run(tmp_path, resume=True)
  assert_same(tmp_path, straight)


def test_an_evaluation_that_was_made_up_for_is_made_once(
  evaluated, straight, tmp_path, monkeypatch
):
  """A resumed run dies after it, before its next checkpoint."""
  evaluated.signal_at = BATCHES
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path)
  evaluated.signal_at = None

  def fail(self, pause):
    raise MemoryError('killed')

  with monkeypatch.context() as patch:
    patch.setattr(loop.Loop, 'step', fail)
    with pytest.raises(MemoryError):
      run(tmp_path, resume=True)
  before = len(evaluated.made)
  run(tmp_path, resume=True)
  assert len(evaluated.made) - before == 2 * BATCHES  # After steps 4 and 5.
  assert_same(tmp_path, straight)
