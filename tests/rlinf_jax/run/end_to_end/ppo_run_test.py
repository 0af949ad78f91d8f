"""A run of PPO with a learned reward: folders in, a folder out, resumed."""

import functools
import json

import numpy as np
import pytest
import safetensors.numpy

import own_data
from rlinf_jax import train
from rlinf_jax.data import questions
from rlinf_jax.rewards import functions, verifier
from rlinf_jax.rewards import model as reward_model
import saved
from stages import workflows
from stages.language import classifier, huggingface
from stages.learn import optimizers
from tests.rlinf_jax.rewards import model_test

pytestmark = pytest.mark.slow


def run(folder, workdir, steps, **kwargs):
  model = str(folder / 'warm_start/model')
  workflow = workflows.ppo(
    huggingface.policy(model, response_length=6),
    verifier.verify(
      model,
      rewards=[
        functions.finishes,
        reward_model.reward_model(f'{folder}/judge'),
      ],
      weights=[1.0, 0.1],
    ),
    classifier.value_model(model),
    optimizers.adamw(1e-2),
    optimizers.adamw(1e-2),
    group_size=2,
    kl_reward_coef=0.1,
    critic_warmup_steps=1,
  )
  source = questions.questions(
    model,
    train=str(folder / 'train.jsonl'),
    held_out=str(folder / 'train.jsonl'),
    batch_size=4,
    prompt_length=120,
    held_out_batch=4,
    held_out_rows=4,
  )
  train.train(
    workflow,
    source,
    workdir=str(workdir),
    steps=steps,
    plan=None,
    checkpoint_every=1,
    evaluate_every=100,
    export=functools.partial(huggingface.export, checkpoint=model),
    **kwargs,
  )
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [
    {k: v for k, v in x.items() if k.startswith(('train/', 'rollout/'))}
    for x in lines
    if 'train/value_loss' in x
  ]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
  model = own_data.model(tmp_path)
  own_data.write(tmp_path / 'train.jsonl', range(8))
  model_test.classifier_of(model, tmp_path / 'judge')
  straight = run(tmp_path, tmp_path / 'straight', 3)
  saved.stopped_after(2, tmp_path / 'straight', tmp_path / 'resumed')
  assert run(tmp_path, tmp_path / 'resumed', 3, resume=True) == straight
  assert len({x['train/value_loss'] for x in straight}) == 3
  assert len({x['rollout/reward/reward_model'] for x in straight}) == 3
  paths = model, tmp_path / 'straight/model', tmp_path / 'resumed/model'
  before, after, again = (
    safetensors.numpy.load_file(f'{path}/model.safetensors') for path in paths
  )
  # The critic is not in the model that is written.
  assert before.keys() == after.keys() == again.keys()
  for name in after:
    np.testing.assert_array_equal(after[name], again[name])
  assert any((before[name] != after[name]).any() for name in before)
