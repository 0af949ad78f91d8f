"""Recipes for large models train a tiny one: their CPU-size twins."""

import json

import pytest

import claims
import own_data
from rlinf_jax import train
from rlinf_jax.config import config
from tests.rlinf_jax import recipes_test

# The other files are one of these, or grpo_math, which own_data_test trains,
# with other numbers.
FEWER = ('dapo_qwen2.5_32b', 'grpo_qwen3_30b_a3b', 'ppo_qwen2.5_7b')
BINDINGS = {
  'dapo_qwen2.5_32b': [
    'ROUNDS = 2',
    'OVERLONG = 2',
    'workflows.dapo.expected_rounds = 2',
  ],
}
NAMES = sorted(
  path.stem
  for path in (recipes_test.ROOT / 'gin_configs/recipes').glob('*.gin')
  # The last one reads pictures, which the tiny model cannot.
  if path.stem not in ('tiny', 'grpo_qwen2.5_vl_3b')
)


@pytest.mark.slow
@pytest.mark.parametrize('name', claims.some(NAMES, keep=FEWER))
def test_a_recipe_trains_a_tiny_model(name, tmp_path):
  of_experts = 'a3b' in name
  make = own_data.experts if of_experts else own_data.model
  bindings = [
    *own_data.bindings(tmp_path / 'data', make=make),
    *BINDINGS.get(name, ['train.train.evaluate_every = 0']),
    'train.train.plan = None',
    'EVAL_BATCH = 6',
  ]
  files = [f'gin_configs/recipes/{name}.gin', recipes_test.TINY]
  folder = tmp_path / 'run'
  config.parse(files, bindings, str(folder))
  config.call(train.train, workdir=str(folder))
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  steps = [x for x in map(json.loads, lines) if 'train/policy_loss' in x]
  assert [x['step'] for x in steps] == [1, 2]
  # DAPO may find no group of mixed accuracy to learn from.
  assert steps[-1].get('rollout/response_length_max', 8) == 8
  accuracies = [
    x['eval/accuracy'] for x in map(json.loads, lines) if 'eval/accuracy' in x
  ]
  if 'train.train.evaluate_every = 0' in bindings:
    assert not accuracies
  else:
    assert 0.0 <= accuracies[-1] < 0.2  # A new model.
  exported = json.loads((folder / 'model/config.json').read_text())
  assert exported['model_type'] == ('qwen3_moe' if of_experts else 'qwen2')
