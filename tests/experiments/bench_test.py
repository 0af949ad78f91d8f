"""The bench measures what it says; how fast is for a person to read."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments.bench import step
from rlinf_jax.config import config
from rlinf_jax.runtime import timeline

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_the_bench_ends_in_one_line_of_json():
  bindings = (
    'step.bench.steps = 2',
    'language_model.policy.response_length = 8',
    'transformer.Config.D = 32',
    'transformer.Config.L = 2',
    'transformer.Config.F = 64',
    'VOCABULARY = 64',
  )
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.bench',
      '--gin_file',
      'gin_configs/bench/grpo_step.gin',
      *(f'--gin_bindings={binding}' for binding in bindings),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  figures = json.loads(done.stdout.splitlines()[-1])
  seconds = figures['wall_seconds_per_step']
  # Exactly 8 tokens for each of 64 rows; stages fill the step, and no more.
  assert figures['tokens_per_second'] == pytest.approx(512 / seconds)
  assert 0 < sum(figures['stage_wall_seconds'].values()) <= 1.5 * seconds
  assert figures['first_step_seconds'] > seconds
  assert figures['cpu_seconds_per_step'] > 0 < figures['peak_rss_mib']
  assert 'generate' in figures['stage_cpu_seconds']


def test_a_setting_that_nothing_reads_is_refused():
  recipe = ['gin_configs/bench/grpo_step.gin']
  config.parse(recipe, ['VOCABULRY = 64', 'transformer.Config.L = 1'], '')
  with pytest.raises(ValueError, match='did you mean `VOCABULARY`'):
    config.call(step.bench)


def test_tokens_a_second_are_those_of_all_steps(capsys):
  span = timeline.Span(1, 'all', 'run', 'generate', (1, 1), 0.0, 1.0, 0.5)
  step._report([1.0, 3.0], [1.0, 3.0], [[span]] * 2, [100.0, 20.0], {})
  figures = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert figures['tokens_per_second'] == 30.0
