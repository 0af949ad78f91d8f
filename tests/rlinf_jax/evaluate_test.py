"""Evaluation without training: tables, files, resumption, checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax import evaluate, train
from rlinf_jax.planning import autoplan
from rlinf_jax.report import compare
from rlinf_jax.report.html import evaluation_table
from rlinf_jax.runtime import flows as flows_lib
import stages
from stages import base, workflows
from stages.learn import optimizers
import tiny

ROWS = 6


@stages.stage('verify')
def is_even(answer_B, action_BT, mask_BT):
  right_B = (action_BT.sum(1) % 2 == answer_B % 2).astype(jnp.float32)
  return base.Verdict(right_B, right_B, vote=action_BT[:, 0])


def workflow(samples=4):
  return workflows.grpo(
    tiny.policy(),
    is_even,
    optimizers.adamw(1e-2),
    group_size=2,
    evaluator=lambda *args: stages.language.evaluate.evaluate(
      *args, samples=samples
    ),
  )


def source(sets=('a', 'a', 'b')):
  """Batches of which the last is half padding."""

  def held_out():
    batches = [tiny.problem(ROWS, seed=i) for i in range(len(sets))]
    weights = [np.ones(ROWS, np.float32) for _ in sets]
    weights[-1][ROWS // 2 :] = 0
    return [x._replace(weight=w) for x, w in zip(batches, weights, strict=True)]

  def advance(state, metrics):
    del metrics
    i = int(state['batch'])
    return {'batch': np.array(i + 1)}, tiny.problem(4, seed=i)

  text = lambda token, mask: [
    ' '.join(map(str, row[keep > 0]))
    for row, keep in zip(token, mask, strict=True)
  ]
  return base.Source(
    lambda seed: {'batch': np.array(0)},
    advance,
    held_out,
    text,
    lambda: list(sets),
  )


def run(folder, **kwargs):
  settings = {'plan': {}} | kwargs
  return evaluate.evaluate(
    workflow(), source(), workdir=str(folder), **settings
  )


def trained(folder, steps, **kwargs):
  settings = {'plan': {}, 'checkpoint_every': 2} | kwargs
  return train.train(
    workflow(), source(), workdir=str(folder), steps=steps, **settings
  )


def records(folder):
  lines = (folder / 'completions.jsonl').read_text().splitlines()
  return list(map(json.loads, lines))


def evaluations(folder):
  """Whether each evaluation in training has completions, by its step."""
  found = {}
  for inside in sorted((folder / 'evaluations').iterdir()):
    assert (inside / 'evaluation.json').exists()
    has = (inside / 'completions.jsonl').exists()
    found[int(inside.name.removeprefix('step_'))] = has
  return found


def test_tables_are_those_of_the_completions(tmp_path, capsys):
  sets = run(tmp_path / 'one')['sets']
  rows = records(tmp_path / 'one')
  assert sets.keys() == {'a', 'b', 'all'}
  of = {name: [x for x in rows if x['set'] == name] for name in 'ab'}
  assert [len(of[name]) for name in 'ab'] == [2 * ROWS * 4, ROWS // 2 * 4]
  of['all'] = rows
  for name, x in of.items():
    mean = np.mean([record['correct'] for record in x])
    np.testing.assert_allclose(sets[name]['accuracy']['value'], mean, rtol=1e-6)
    assert sets[name]['accuracy']['problems'] == len(x) / 4
    low, high = sets[name]['accuracy']['interval']
    assert 0 <= low < mean < high <= 1
  assert {(x['problem'], x['sample']) for x in of['a']} == {
    (i, j) for i in range(2 * ROWS) for j in range(4)
  }
  printed = capsys.readouterr().out
  assert 'pass@4' in printed and 'maj@4' in printed and 'all' in printed
  page = (tmp_path / 'one/report.html').read_text()
  assert '<h3>Evaluation</h3>' in page and '>unfinished<' not in page


def test_an_evaluation_runs_the_plan_that_it_finds(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(autoplan, 'SECONDS', 1.0)  # Any plan will do.
  given = run(tmp_path / 'given')['sets']
  capsys.readouterr()
  found = run(tmp_path / 'found', plan='auto')['sets']
  assert 'Plan: ' in capsys.readouterr().out
  # Rounding, which another mesh changes, may change a sampled token.
  assert given.keys() == found.keys()
  accuracy = lambda sets: sets['all']['accuracy']['value']
  assert abs(accuracy(given) - accuracy(found)) < 0.1


def test_a_stopped_evaluation_goes_on(tmp_path, monkeypatch):
  whole = run(tmp_path / 'whole')
  calls = []

  def stop(runtime, held_out, i, key, go=evaluate.evaluation.evaluate_batch):
    calls.append(i)
    if calls == [0, 1]:
      raise KeyboardInterrupt
    return go(runtime, held_out, i, key)

  monkeypatch.setattr(evaluate.evaluation, 'evaluate_batch', stop)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / 'cut')
  with pytest.raises(FileExistsError, match='--resume'):
    run(tmp_path / 'cut')
  resumed = run(tmp_path / 'cut', resume=True)
  assert calls == [0, 1, 1, 2]
  assert resumed['sets'] == whole['sets']
  assert records(tmp_path / 'cut') == records(tmp_path / 'whole')
  # Nothing is left to do.
  assert run(tmp_path / 'cut', resume=True) == resumed
  assert calls == [0, 1, 1, 2]


def test_an_evaluation_of_something_else_is_not_resumed(tmp_path):
  run(tmp_path / 'a')
  with pytest.raises(ValueError, match='was begun with other bindings'):
    run(tmp_path / 'a', resume=True, seed=1)


def test_a_resumed_evaluation_keeps_its_checkpoint(tmp_path, monkeypatch):
  kept, go = [], evaluate.evaluation.evaluate_batch

  def stop(runtime, held_out, i, key):
    if i == 1 and not kept:
      kept.append(i)
      raise KeyboardInterrupt
    return go(runtime, held_out, i, key)

  settings = {'checkpoint_of': str(tmp_path / 'run')}
  saved = {'checkpoint_every': 1, 'resume': True, 'keep_completions': 0}
  trained(tmp_path / 'run', 1, **saved)
  assert evaluations(tmp_path / 'run') == {0: False, 1: False}
  whole = run(tmp_path / 'whole', **settings)
  monkeypatch.setattr(evaluate.evaluation, 'evaluate_batch', stop)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / 'cut', **settings)
  trained(tmp_path / 'run', 2, **saved)
  resumed = run(tmp_path / 'cut', resume=True, **settings)
  assert resumed['evaluated']['step'] == 1
  assert resumed['sets'] == whole['sets']


def test_a_plan_for_training_serves_an_evaluation(tmp_path):
  plan = {
    'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
    'stages': {'generate': 'actor', 'answer': 'actor', '*': 'learner'},
    'micro_batch': {'gradient': 2, 'answer': 4},
    'pieces': 2,
  }
  sets = run(tmp_path / 'a', plan=plan)['sets']
  assert sets == run(tmp_path / 'b')['sets']


def test_another_seed_samples_others_and_the_same_seed_the_same(tmp_path):
  texts = {}
  for name, seed in (('a', 0), ('b', 0), ('c', 1)):
    evaluate.evaluate(
      workflow(),
      source(('x',)),
      workdir=str(tmp_path / name),
      plan={},
      seed=seed,
    )
    texts[name] = [x['completion'] for x in records(tmp_path / name)]
  assert texts['a'] == texts['b'] != texts['c']


def test_a_checkpoint_is_evaluated_as_its_run_did(tmp_path):
  metrics = trained(tmp_path / 'run', 2).metrics
  result = run(tmp_path / 'scores', checkpoint_of=str(tmp_path / 'run'))
  for name, values in result['sets'].items():
    metric = 'eval/accuracy' if name == 'all' else f'eval/{name}/accuracy'
    assert values['accuracy']['value'] == metrics[metric]
  during = tmp_path / 'run/evaluations/step_000002'
  for name in ('completions.jsonl', 'samples.jsonl'):
    assert (during / name).read_text() == (
      tmp_path / 'scores' / name
    ).read_text()
  record = json.loads((during / 'evaluation.json').read_text())
  assert record.keys() == result.keys()
  assert record['evaluated'] == result['evaluated']
  assert record['sets'] == result['sets']
  table = evaluation_table.as_html(evaluation_table.rows(result['sets']))
  for folder, title in (
    ('run', 'Evaluation after step 2'),
    ('scores', 'Evaluation'),
  ):
    page = (tmp_path / folder / 'report.html').read_text()
    assert f'<h3>{title}<' in page and page.count(table) == 1
  with pytest.raises(FileExistsError, match='--eval_checkpoint'):
    run(tmp_path / 'run', resume=True)
  with pytest.raises(FileNotFoundError, match='no checkpoint to evaluate'):
    run(tmp_path / 'other', checkpoint_of=str(tmp_path / 'scores'))


def test_a_resumed_run_leaves_each_evaluation_once(tmp_path, monkeypatch):
  go, calls = evaluate.evaluation.evaluate_batch, []

  def stop(*args):
    calls.append(args)
    if len(calls) == 14:  # The second batch after step 4.
      raise RuntimeError
    return go(*args)

  settings = {'evaluate_every': 1, 'keep_completions': 2}
  monkeypatch.setattr(evaluate.evaluation, 'evaluate_batch', stop)
  with pytest.raises(RuntimeError):
    trained(tmp_path / 'a', 4, **settings)
  assert evaluations(tmp_path / 'a') == {0: False, 1: False, 2: True, 3: True}
  # From the checkpoint of step 2, without an evaluation of step 3.
  settings['evaluate_every'] = 2
  metrics = trained(tmp_path / 'a', 4, resume=True, **settings).metrics
  assert evaluations(tmp_path / 'a') == {0: False, 1: False, 2: True, 4: True}
  rows = records(tmp_path / 'a/evaluations/step_000004')
  assert len(rows) == 4 * (2 * ROWS + ROWS // 2)
  mean = np.mean([row['correct'] for row in rows])
  np.testing.assert_allclose(metrics['eval/accuracy'], mean, rtol=1e-6)
  two = [tmp_path / f'a/evaluations/step_00000{i}' for i in (2, 4)]
  page = compare.write(two, tmp_path / 'compare.html').read_text()
  assert '<h2>Evaluations</h2>' in page
  assert f'<h2>Completions <small>of {len(rows) // 4} problems' in page


def test_an_evaluation_holds_no_moments():
  flow, _ = flows_lib.trace_evaluation(workflow(), source(), 0)
  sizes = {True: 0, False: 0}
  for start, _ in flow.carry:
    sizes[start in flow.readers] += flow.values[start].bytes
  state = jax.eval_shape(workflow().init, jax.random.key(0))
  params = sum(x.size * 4 for x in jax.tree.leaves(state.actor.params))
  assert sizes[True] == params + 4  # And the number of updates.
  assert sizes[False] <= 64  # Scalars.
