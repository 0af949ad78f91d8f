"""`--plan_only` has plans for 7B with long completions, by a recipe alone."""

import json
import pathlib
import subprocess
import sys

import pytest

import core_only
import front_door

ROOT = pathlib.Path(__file__).parents[2]


def planned(cluster, tmp_path, *flags):
  """Returns what `--plan_only` prints for groups of 16, and writes."""
  file = tmp_path / 'plan.json'
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'rlinf_jax.main', '--plan_only'),
      *('--gin_file', 'experiments/compiled/grpo.gin'),
      *('--cluster', f'gin_configs/clusters/{cluster}.gin'),
      *('--gin.GROUP=16', '--gin.LENGTH=8192', '--plan_json', str(file)),
      *flags,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=core_only.environment() | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  data = json.loads(file.read_text())
  assert data['plan'] and data['seconds'] > 0, done.stdout
  used = {d for p in data['plan']['places'].values() for d in p['devices']}
  assert used == {*range(8)}
  # Activations of 128 rows of 8,704 tokens would need hundreds of gigabytes.
  assert data['plan']['micro_batch']['gradient'] < 128
  return done.stdout, data


@pytest.mark.claims
@pytest.mark.slow
@pytest.mark.parametrize('cluster', ['h100', 'tpu_v5p_8'])
def test_7b_at_512_and_8192_tokens_has_a_plan_for_eight_devices(
  cluster, tmp_path
):
  """`v5p-16` is a box of eight chips of two cores."""
  planned(cluster, tmp_path)


@pytest.mark.claims
@pytest.mark.slow
def test_the_plan_of_7b_for_1024_devices_is_proved_within_a_minute(tmp_path):
  """The minute is of the whole report; the proof takes a part of it."""
  file = tmp_path / 'plan.json'
  done = front_door.run(
    *('--plan_only', '--gin_file', 'experiments/compiled/grpo.gin'),
    *('--gin.GROUPS=128', '--gin.GROUP=16', '--plan_json', str(file)),
    *('--cluster', 'gin_configs/clusters/h100x1024.gin'),
  )
  assert done.returncode == 0, done.stderr
  data = json.loads(file.read_text())
  assert data['searched']['proved'] and data['searched']['gap'] == 0


def unproved(text, data):
  """Whether a plan is reported of which nothing is proved."""
  assert 'time was up before anything was proved' in text
  assert len(data['plan']['places']) == 1
  assert data['searched']['gap'] == 1 and not data['searched']['proved']


@pytest.mark.claims
@pytest.mark.slow
def test_7b_has_a_plan_however_little_time_there_is(tmp_path):
  unproved(*planned('h100', tmp_path, '--plan_seconds', '0'))


def test_a_recipe_has_a_plan_however_little_time_there_is(tmp_path):
  """Of a small policy: the stages of 7B are counted on more meshes."""
  file = tmp_path / 'plan.json'
  done = front_door.run(
    *('--plan_only', '--gin_file', 'gin_configs/ppo_push.gin'),
    *('--cluster', 'gin_configs/clusters/h100.gin'),
    *('--plan_seconds', '0', '--plan_json', str(file)),
  )
  assert done.returncode == 0, done.stderr
  unproved(done.stdout, json.loads(file.read_text()))
