"""Pages that compare runs and evaluations."""

import json
import sys

import pytest

import fake_run
from rlinf_jax.report import compare, report
from tests.rlinf_jax.report.report_test import drawn, Page


def evaluation(folder, right):
  """An evaluation as --eval_only leaves it; None of problems that failed."""
  folder.mkdir(parents=True)
  share = sum(map(bool, right)) / len(right)
  accuracy = {'value': share, 'stderr': 0.1, 'interval': [0.1, 0.9]}
  sets = {'all': {'accuracy': {**accuracy, 'problems': len(right)}}}
  (folder / 'evaluation.json').write_text(
    json.dumps({'seconds': 1.0, 'sets': sets})
  )
  fake_run.write_lines(
    folder / 'metrics.jsonl', [{'step': 0, 'eval/accuracy': share}]
  )
  fake_run.write_lines(
    folder / 'completions.jsonl',
    [
      {
        'set': 'all',
        'problem': i,
        'sample': 0,
        'prompt': f'<b>{i}',
        'completion': f'{folder.name} says {i}',
        'answer': f'<{i}>',
        'correct': float(x or 0),
      }
      | ({'env_failed': True} if x is None else {})
      for i, x in enumerate(right)
    ],
  )
  return folder


def test_an_evaluation_alone_has_a_table_and_no_curves(tmp_path):
  folder = evaluation(tmp_path / 'scores', [1, 0])
  line = {'step': 0, 'eval/accuracy': 0.5, 'eval/pass_at_4': 0.75}
  fake_run.write_lines(folder / 'metrics.jsonl', [line])
  sample = {'step': 0, 'split': 'eval', 'prompt': '1+1=', 'completion': '2'}
  sample |= {'reward': 1.0, 'correct': 1.0}
  fake_run.write_lines(folder / 'samples.jsonl', [sample])
  page = report.write(folder).read_text(encoding='utf-8')
  assert '<h3>Evaluation</h3>' in page and 'Several samples' not in page
  assert 'The first ones' in page and 'After step' not in page


def test_runs_are_compared_curve_by_curve(tmp_path):
  a = fake_run.make_run(tmp_path / 'a')
  b = fake_run.make_run(tmp_path / 'b', steps=100)
  config = b / 'config.gin'
  config.write_text(config.read_text().replace('0.28', '0.2'))
  text = compare.write([a, b], tmp_path / 'c.html').read_text()
  page = Page(text)
  assert page.open == [] and page.fetched == ['data:,']
  assert len(drawn(text)) >= 5
  assert all('var(--s1)' in x and 'var(--s2)' in x for x in drawn(text))
  assert '-grpo.grpo.clip_high = 0.28' in text
  assert '+grpo.grpo.clip_high = 0.2 ' in text
  assert 'group_size' not in text  # It is the same.


def test_a_set_on_which_one_run_was_evaluated_is_shown(tmp_path):
  a = evaluation(tmp_path / 'a', [1, 0])
  line = {'step': 0, 'eval/sums/accuracy': 0.75, 'reward/mean': 0.5}
  fake_run.write_lines(a / 'metrics.jsonl', [line])
  b = evaluation(tmp_path / 'b', [1, 1])
  text = compare.write([a, b], tmp_path / 'c.html').read_text()
  assert '<td>eval/sums/accuracy</td><td>0.75</td><td>–</td>' in text
  assert '<td>reward/mean</td>' not in text


def test_completions_that_one_run_alone_has_right_are_shown(tmp_path):
  a = evaluation(tmp_path / 'a', [1, 0, 0, 1])
  b = evaluation(tmp_path / 'b', [1, 1, 0, 0])
  text = compare.write([a, b], tmp_path / 'c.html').read_text()
  assert Page(text).open == []
  assert 'of 4 problems; on 2 of them both are as good' in text
  for shown in ('a says 1', 'b says 1', 'a says 3', 'b says 3'):
    assert shown in text
  assert 'a says 0' not in text and '<b>1' not in text
  assert text.count('The answer is &lt;1&gt;') == 2
  assert '50.0% (10.0–90.0)' in text
  assert 'Evaluated in 1 seconds. all: 50.0% of 4.' in text


def test_the_newest_evaluations_of_training_runs_are_compared(tmp_path):
  a, b = (fake_run.make_run(tmp_path / name) for name in 'ab')
  evaluation(a / 'evaluations' / 'step_000000', [1, 1])
  evaluation(a / 'evaluations' / 'step_000020', [0, 1])
  evaluation(b / 'evaluations' / 'step_000040', [1, 1])
  text = compare.write([a, b], tmp_path / 'c.html').read_text()
  assert Page(text).open == []
  assert 'a after step 20' in text and 'after step 0' not in text
  assert 'b after step 40 is better <small>1 problems' in text
  assert 'step_000020 says 0' in text and 'step_000040 says 0' in text
  assert '50.0% (10.0–90.0)' in text


def test_completions_whose_environment_failed_are_not_compared(tmp_path):
  a = evaluation(tmp_path / 'a', [1, 1, 0])
  b = evaluation(tmp_path / 'b', [None, 1, 1])
  text = compare.write([a, b], tmp_path / 'c.html').read_text()
  assert 'of 2 problems; on 1 of them both are as good' in text
  assert 'b says 2' in text and 'b says 0' not in text


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda path: [path / 'a', path / 'a'], 'is given twice'),
    (lambda path: [path / 'a', path / 'none'], 'has no metrics to report'),
    (lambda path: [path / f'{i}' for i in range(9)], 'compare fewer'),
  ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, make, message):
  evaluation(tmp_path / 'a', [1])
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    compare.write(make(tmp_path), tmp_path / 'c.html')


def test_runs_in_folders_of_one_name_are_told_apart():
  assert compare.names(['x/a/run', 'x/b/run']) == ['a/run', 'b/run']


def test_the_command_line_compares(tmp_path, monkeypatch, capsys):
  for name in 'ab':
    evaluation(tmp_path / name, [1, 0])
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'argv', ['report', 'a', 'b'])
  report.main()
  assert capsys.readouterr().out.strip() == 'compare.html'
  assert (tmp_path / 'compare.html').exists()
