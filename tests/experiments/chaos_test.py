"""Trials are judged by what their runs left and computed."""

import json
import pathlib

from experiments.chaos import __main__ as chaos
from experiments.chaos import runs

GOOD = {
  'kind': 'words',
  'fault': 'interrupt',
  'phase': 'step',
  'code': 130,
  'traceback': False,
  'left': {},
  'resumed': 0,
  'left_resumed': {},
  'same': True,
}


def test_a_trial_is_judged_by_each_of_its_findings():
  assert chaos.verdict(GOOD) == 'as it should be'
  for change, verdict in (
    ({'code': 'did not end'}, 'hangs'),
    ({'code': -6}, 'aborted'),
    ({'code': -6, 'told': True}, 'as it should be'),
    ({'traceback': True}, 'traceback'),
    ({'resumed': 1}, 'not continued'),
    ({'same': False}, 'other metrics'),
    ({'left_resumed': {'temporary': ['x']}}, 'something left'),
    ({'left': {'processes': ['x']}}, 'something left'),
    ({'left': {'processes': ['x']}, 'fault': 'kill_driver'}, 'processes left'),
  ):
    assert chaos.verdict(GOOD | change) == verdict
  # A killed process leaves its files.
  killed = {'left': {'temporary': ['x']}, 'fault': 'kill_everything'}
  assert chaos.verdict(GOOD | killed) == 'as it should be'


def test_the_table_counts_trials_by_fault_and_kind():
  too_late = GOOD | {'phase': chaos.UNDISTURBED}
  lines = [*chaos.table([GOOD, GOOD, GOOD | {'same': False}, too_late])]
  assert lines == [
    '| fault | words |',
    '|---|---|',
    '| interrupt | 2 of 3, 1 other metrics |',
  ]


def test_the_page_has_the_table_of_the_trials_beside_it():
  folder = pathlib.Path(chaos.__file__).parent
  page = (folder / 'README.md').read_text()
  for name, count in (
    ('trials', 'All {} trials'),
    ('later_trials', 'Of these, {} were made'),
    ('aimed_trials', 'Of these 44, {} were made'),
  ):
    trials = (folder / f'{name}.jsonl').read_text().splitlines()
    assert '\n'.join(chaos.table([*map(json.loads, trials)])) in page
    assert count.format(len(trials)) in page


def test_a_trial_keeps_its_meaning():
  for file in pathlib.Path(chaos.__file__).parent.glob('*trials.jsonl'):
    for trial in map(json.loads, file.read_text().splitlines()):
      kind, fault, _ = chaos.chosen(trial['seed'])
      assert (kind, fault.__name__) == (trial['kind'], trial['fault'])


def test_metrics_of_time_are_left_out_and_later_lines_count(tmp_path):
  lines = [
    {'step': 1, 'train/loss': 1.0, 'time/step': 3.0},
    {'step': 1, 'eval/score': 0.5},
    {'step': 1, 'train/loss': 2.0},
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text)
  assert runs.metrics(tmp_path) == {
    'train 1': {'step': 1, 'train/loss': 2.0},
    'eval 1': {'step': 1, 'eval/score': 0.5},
  }
