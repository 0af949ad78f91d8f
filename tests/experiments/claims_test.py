import json
import pathlib
import re

import pytest

from experiments.claims import __main__ as claims_main
from experiments.claims import figure

ROOT = pathlib.Path(__file__).parents[2]


def test_commands_name_files_and_folders_that_exist():
  for claim in claims_main.read():
    for path in re.findall(
      r'(?<![\w/])(?:tests|gin_configs|experiments)/[\w/]+(?:\.(?!venv)\w+)?',
      ' '.join(claim.commands),
    ):
      assert (ROOT / path).exists(), f'{claim.name} names {path}.'
    for module in re.findall(r'-m (experiments[\w.]+)', str(claim.commands)):
      path = ROOT / module.replace('.', '/')
      assert path.with_suffix('.py').exists() or path.is_dir(), module


def test_every_instance_that_make_test_leaves_out_is_in_a_command():
  every = (command for one in claims_main.read() for command in one.commands)
  # A command with `-k` may run a part of the instances.
  whole = ' '.join(command for command in every if ' -k ' not in command)
  named = {*re.findall(r'tests/[\w/]+\.py\b', whole)}
  # This module only names the marks.
  for path in {*(ROOT / 'tests').rglob('*_test.py')} - {pathlib.Path(__file__)}:
    text = path.read_text()
    if 'mark.claims' in text or 'claims.some(' in text:
      assert str(path.relative_to(ROOT)) in named, (
        f'{path} has instances for `make claims`, and no command of '
        'experiments/claims/claims.toml runs it.'
      )


def test_the_page_has_every_claim():
  page = (ROOT / 'docs/claims.md').read_text()
  for claim in claims_main.read():
    assert f'| {claim.claim} |' in page, (
      'Run python -m experiments.claims --write'
    )


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
  for name in ('RECORDS', 'PAGE', 'ROUND'):
    monkeypatch.setattr(claims_main, name, tmp_path / name)
  monkeypatch.setattr(claims_main, 'git', lambda *words: 'abc')
  return tmp_path


# The output of pytest in two commands.
SKIPPING = (
  'echo "3 skipped in the morning"; echo "93 passed, 9 skipped in 266.81s"',
  'echo "1 failed, 5 passed, 2 skipped, 1 warning in 6.30s (0:00:06)"',
)


def test_a_round_goes_on_where_it_stopped(elsewhere, monkeypatch):
  ran, broken = elsewhere / 'ran', elsewhere / 'broken'
  broken.touch()
  claims = [
    claims_main.Claim('one', 'One', '1 %', (f'echo one >> {ran}',)),
    claims_main.Claim(
      'two', 'Two', '2 %', (f'echo two >> {ran}; echo figure: 3 %',)
    ),
    claims_main.Claim('tests', 'Tests', '5 %', SKIPPING),
    claims_main.Claim('three', 'Three', '4 %', (f'! test -e {broken}',)),
  ]
  monkeypatch.setattr(claims_main, 'read', lambda: claims)
  monkeypatch.setattr('sys.argv', ['claims'])
  with pytest.raises(SystemExit, match='run again by the next call: three'):
    claims_main.main()
  broken.unlink()
  claims_main.main()
  assert ran.read_text() == 'one\ntwo\n'
  records = json.loads((elsewhere / 'RECORDS').read_text())
  found = [records[x.name]['figure'] for x in claims]
  assert found == ['1 %', '3 %', '5 %', '4 %']
  page = (elsewhere / 'PAGE').read_text()
  assert '| Two | 3 % |' in page
  assert '| Tests | 5 % (11 tests skipped) |' in page
  claims_main.main()  # A new round.
  assert ran.read_text() == 'one\ntwo\n' * 2


@pytest.mark.parametrize(
  'date, figure', [('2026-11-26', '91 %'), ('2026-11-29', '99 %')]
)
def test_a_row_has_the_later_of_a_record_and_a_figure_by_hand(date, figure):
  claim = claims_main.Claim('one', 'One', '91 %', ('true',))
  claim = claim._replace(by_hand=('abc', '2026-11-28'))
  found = {'figure': '99 %', 'commit': 'def', 'date': date, 'machine': 'here'}
  assert claims_main.row(claim, found).startswith(f'| One | {figure} |')


def test_a_figure_is_the_first_and_the_last_evaluation(tmp_path):
  lines = [{'eval/accuracy': x} for x in (0.326, 0.2, 0.936)]
  text = ''.join(json.dumps(line) + '\n' for line in [*lines, {'loss': 1}])
  (tmp_path / 'metrics.jsonl').write_text(text)
  values = figure.evaluations(tmp_path, 'eval/accuracy')
  assert figure.describe(values) == '32.6 → 93.6 %'
  assert figure.describe(values, True) == '32.6 → 93.6 %, from 20 to 93.6 %'
