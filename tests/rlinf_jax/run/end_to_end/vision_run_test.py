"""GRPO on questions about pictures, from files to an exported model."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from rlinf_jax import train
from rlinf_jax.data import questions
from rlinf_jax.prepare import tiny_vision
import stages
from stages import workflows
from stages.language import huggingface
from stages.learn import optimizers

pytestmark = pytest.mark.slow

METRICS = (
  'rollout/reward_mean',
  'rollout/response_length_mean',
  'train/grad_norm',
  'train/entropy',
)

PLACES = {
  'places': {'actor': {'devices': [0]}, 'learner': {'devices': [1]}},
  'stages': {
    'repeat': 'actor',
    'keys': 'actor',
    'generate': 'actor',
    '*': 'learner',
  },
  'pieces': 2,
  'micro_batch': {'gradient': 4},
}


@stages.stage('reward')
def prefer_small(answer, action, mask):
  """Rewards the share of tokens in the first half of the vocabulary."""
  share = ((action < 36) * mask).sum(1) / mask.sum(1)
  return stages.Verdict(share, (share > 0.9).astype(jnp.float32))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('charts')
  tiny_vision.model(folder / 'model')
  for name in 'train', 'test':
    tiny_vision.write(folder, name, 8, held_out=name == 'test')
  return folder


def run(folder, workdir, plan, steps):
  """Metrics of a run without times, and its exported parameters."""
  model = str(folder / 'model')
  source = questions.questions(
    model,
    train=str(folder / 'train.jsonl'),
    held_out=str(folder / 'test.jsonl'),
    batch_size=4,
    prompt_length=40,
  )
  policy = huggingface.policy(model, response_length=4)
  train.train(
    workflows.grpo(policy, prefer_small, optimizers.adamw(1e-3), group_size=4),
    source,
    workdir=str(workdir),
    steps=steps,
    plan=plan,
    export=functools.partial(huggingface.export, checkpoint=model),
  )
  config = huggingface.load_config(model)
  params = huggingface.load_params(workdir / 'model', config)
  rows = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  found = [{k: v for k, v in x.items() if k in METRICS} for x in rows]
  return [x for x in found if x], params


def test_a_plan_changes_only_rounding_and_the_tower_is_trained(
  folder, tmp_path
):
  rows, want = run(folder, tmp_path / 'one', None, 3)
  before = huggingface.load_params(
    folder / 'model', huggingface.load_config(folder / 'model')
  )
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), before['tower'], want['tower']
  )
  assert min(jax.tree.leaves(moved)) > 0
  assert len(rows) == 3 and all(len(x) == len(METRICS) for x in rows)
  # Pieces add gradients in another order, and Adam divides small ones by their
  # size: compared is what both runs saw and learned from.
  others, _ = run(folder, tmp_path / 'two', PLACES, 3)
  for got, row in zip(others, rows, strict=True):
    assert got == pytest.approx(row, rel=1e-4)
  read = transformers.AutoModelForImageTextToText.from_pretrained(
    tmp_path / 'one/model'
  )
  np.testing.assert_array_equal(
    read.model.visual.merger.ln_q.weight.detach(), want['tower']['norm_D']
  )
  for name in 'preprocessor_config.json', 'chat_template.jinja':
    assert (tmp_path / 'one/model' / name).is_file()
