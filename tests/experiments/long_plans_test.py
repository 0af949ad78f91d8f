"""`--plan_only` has plans for 7B with long completions, by a recipe alone."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import claims

ROOT = pathlib.Path(__file__).parents[2]
CLUSTERS = ['h100', 'tpu_v5p_8']


@pytest.mark.slow
@pytest.mark.parametrize('cluster', claims.some(CLUSTERS, CLUSTERS[:1]))
def test_7b_at_512_and_8192_tokens_has_a_plan_for_eight_devices(
  cluster, tmp_path
):
  """Groups of 16; `v5p-16` is a box of eight chips of two cores."""
  file = tmp_path / 'plan.json'
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'rlinf_jax.main', '--plan_only'),
      *('--gin_file', 'experiments/compiled/grpo.gin'),
      *('--cluster', f'gin_configs/clusters/{cluster}.gin'),
      *('--gin.GROUP=16', '--gin.LENGTH=8192', '--plan_json', str(file)),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  data = json.loads(file.read_text())
  assert data['plan'] and data['seconds'] > 0, done.stdout
  used = {d for p in data['plan']['places'].values() for d in p['devices']}
  assert used == {*range(8)}
  # Activations of 128 rows of 8,704 tokens would need hundreds of gigabytes.
  assert data['plan']['remat']['gradient'] == 'nothing_saveable'
