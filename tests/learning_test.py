"""The main job learns: one short seed of what `experiments/arithmetic` runs."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_grpo_learns_sums_that_imitation_left_wrong(tmp_path):
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'rlinf_jax.main'),
      *('--gin_file', 'gin_configs/grpo_arithmetic.gin'),
      '--gin_bindings=STEPS = 40',
      '--gin_bindings=train.train.evaluate_every = 40',
      '--gin_bindings=imitate/train.train.evaluate_every = 25',
      *('--workdir', str(tmp_path / 'run')),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  accuracy = [
    line['eval/accuracy']
    for line in map(json.loads, lines)
    if 'eval/accuracy' in line
  ]
  # 512 problems: two standard errors are 4 points.
  assert 0.1 <= accuracy[0] <= 0.4
  assert accuracy[-1] >= accuracy[0] + 0.15
