"""Claims about how comparisons with other systems are computed."""

import json
import sys

import pytest

from experiments import compare

FIGURES = {
  'cpu_seconds_per_step': 2.0,
  'wall_seconds_per_step': 1.0,
  'first_step_seconds': 4.0,
}


def test_the_last_json_object_is_read_past_other_output():
  first = json.dumps(FIGURES | {'cpu_seconds_per_step': 9.0})
  text = f'{first}\n{json.dumps(FIGURES | {"more": 1})}\nbye\n{{no json\n'
  assert compare.last_json_object(text) == FIGURES | {'more': 1}


def test_a_missing_figure_is_named():
  with pytest.raises(ValueError, match='lacks first_step_seconds'):
    compare.last_json_object(
      json.dumps({k: v for k, v in FIGURES.items() if k[0] != 'f'})
    )


def test_output_without_json_is_refused():
  with pytest.raises(ValueError, match='No line'):
    compare.last_json_object('a table\n[1, 2]\n')


def test_equal_ratios_have_an_interval_of_no_width():
  assert compare.interval_of_median([1.5] * 5) == (1.5, 1.5)


def test_the_interval_of_five_ratios_is_their_second_and_fourth_or_wider():
  low, high = compare.interval_of_median([1.0, 2.0, 3.0, 4.0, 5.0])
  assert 1.0 <= low <= 2.0 and 4.0 <= high <= 5.0


def test_ratios_are_taken_within_pairs():
  # The machine halves its speed in the second pair: the ratio stays 3.
  pairs = [
    {
      'ours': {name: value * slow for name, value in FIGURES.items()},
      'theirs': {name: 3 * value * slow for name, value in FIGURES.items()},
    }
    for slow in (1.0, 2.0, 1.0)
  ]
  row = compare.compare(pairs)['cpu_seconds_per_step']
  assert row['ratios'] == [3.0, 3.0, 3.0] and row['interval'] == [3.0, 3.0]
  assert (row['ours'], row['theirs']) == (2.0, 6.0)


def test_figures_that_one_side_lacks_are_not_compared():
  pairs = [{'ours': FIGURES, 'theirs': FIGURES | {'peak_rss_mib': 1.0}}]
  assert set(compare.compare(pairs)) == set(FIGURES)


def test_a_failing_side_is_reported_with_its_error():
  with pytest.raises(RuntimeError, match='(?s)exit code 3.*out of luck'):
    compare.run(
      [
        sys.executable,
        '-c',
        'import sys; print("out of luck", file=sys.stderr); sys.exit(3)',
      ],
      timeout=60,
    )


def test_both_sides_compile_for_themselves(monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'somewhere')
  environment = compare.environment()
  assert 'JAX_COMPILATION_CACHE_DIR' not in environment
  assert environment['JAX_ENABLE_COMPILATION_CACHE'] == 'false'


def test_fewer_pairs_than_an_interval_needs_are_refused(capsys):
  python = ['tunix', '--theirs_python', sys.executable]
  with pytest.raises(SystemExit):
    compare.parse(python + ['--pairs', '4'])
  assert 'needs at least 5' in capsys.readouterr().err


def test_main_alternates_and_writes_the_results(tmp_path, capsys):
  output = tmp_path / 'results.json'
  fake = tmp_path / 'python'
  line = json.dumps(FIGURES)
  fake.write_text(f"#!/bin/sh\necho '{line}'\n")
  fake.chmod(0o755)
  compare.main(
    ['trl', '--ours_python', str(fake), '--theirs_python', str(fake)]
    + ['--pairs', '5', '--output', str(output)]
  )
  results = json.loads(output.read_text())
  assert len(results['pairs']) == 5
  assert results['figures']['cpu_seconds_per_step']['interval'] == [1.0, 1.0]
  captured = capsys.readouterr()
  assert 'at least 1.00 times ours' in captured.out
  sides = [line.split(':')[0].split()[-1] for line in captured.err.splitlines()]
  assert sides == ['ours', 'theirs'] * 6
