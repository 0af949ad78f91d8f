"""A run that trains adapters: resumed to the bit, exported, and continued."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

import own_data
from rlinf_jax import train
from rlinf_jax.data import questions
from rlinf_jax.rewards import functions, verifier
import saved
from stages import base, workflows
from stages.language import huggingface
from stages.learn import optimizers
from stages.models import lora, quantization

pytestmark = pytest.mark.slow


def run(folder, workdir, steps, adapters=lora.Lora(rank=3), **kwargs):
  model = str(folder / 'warm_start/model')
  workflow = workflows.grpo(
    huggingface.policy(model, response_length=6, lora=adapters),
    verifier.verify(model, rewards=[functions.finishes], weights=[1.0]),
    optimizers.adamw(1e-2),
    group_size=4,
    kl_coef=0.1,
  )
  train.train(
    workflow,
    questions.questions(
      model,
      train=str(folder / 'train.jsonl'),
      held_out=str(folder / 'train.jsonl'),
      batch_size=4,
      prompt_length=120,
      held_out_batch=4,
      held_out_rows=4,
    ),
    workdir=str(workdir),
    steps=steps,
    plan=None,
    checkpoint_every=1,
    evaluate_every=100,
    export=functools.partial(huggingface.export, checkpoint=model),
    **kwargs,
  )
  lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
  return [x['train/kl_reference'] for x in lines if 'train/kl_reference' in x]


def tensors(path):
  return safetensors.numpy.load_file(path / 'adapter_model.safetensors')


def assert_same(got, want):
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_a_resumed_run_is_the_uninterrupted_one_and_goes_on_elsewhere(tmp_path):
  model = pathlib.Path(own_data.model(tmp_path))
  own_data.write(tmp_path / 'train.jsonl', range(8))
  straight = run(tmp_path, tmp_path / 'straight', 3)
  assert straight[0] == 0 < straight[1]
  saved.stopped_after(2, tmp_path / 'straight', tmp_path / 'resumed')
  assert run(tmp_path, tmp_path / 'resumed', 3, resume=True) == straight
  exported = tmp_path / 'straight/model'
  assert_same(tensors(tmp_path / 'resumed/model'), tensors(exported))

  # A checkpoint holds the adapter and its moments, and not the weights.
  written = [
    path
    for path in (tmp_path / 'straight/checkpoints/3').rglob('*')
    if path.name == '_METADATA'
  ]
  assert written and not any('embed_VD' in x.read_text() for x in written)

  # Training goes on from what was exported.
  settings = lora.Lora(adapter=str(exported))
  further = run(tmp_path, tmp_path / 'further', 1, settings)
  assert further == [0.0]  # The reference is the adapter that it began with.
  assert any(
    (tensors(exported)[name] != x).any()
    for name, x in tensors(tmp_path / 'further/model').items()
  )

  # Beside other weights, a checkpoint is refused.
  weights = safetensors.numpy.load_file(model / 'model.safetensors')
  name = 'model.layers.0.mlp.up_proj.weight'
  weights[name] = weights[name] + np.float32(1e-3)
  safetensors.numpy.save_file(weights, model / 'model.safetensors')
  (tmp_path / 'resumed/result.json').unlink()
  with pytest.raises(ValueError, match='beside other frozen weights'):
    run(tmp_path, tmp_path / 'resumed', 4, resume=True)


def test_a_run_beside_quantized_weights_is_resumed_and_merged(tmp_path):
  pytest.importorskip('qwix', reason='pip install "rlinf-jax[qlora]".')
  model = own_data.model(tmp_path)
  own_data.write(tmp_path / 'train.jsonl', range(8))
  adapters = lora.Lora(rank=3, quantize='nf4')
  straight = run(tmp_path, tmp_path / 'straight', 2, adapters)
  assert straight[0] == 0 < straight[1]
  saved.stopped_after(1, tmp_path / 'straight', tmp_path / 'resumed')
  resumed = run(tmp_path, tmp_path / 'resumed', 2, adapters, resume=True)
  assert resumed == straight
  exported = tmp_path / 'straight/model'
  assert_same(tensors(tmp_path / 'resumed/model'), tensors(exported))

  # A merged model has the weights that the adapter was trained beside.
  params = lora.wrap(
    huggingface.policy(model, response_length=6), adapters
  ).init(jax.random.key(0))
  huggingface.export(tmp_path / 'merged', params, model, merge_lora=True)
  config = huggingface.load_config(model)
  merged = huggingface.load_params(tmp_path / 'merged', config)
  layers = params[base.FROZEN][lora.PARAMS]['layers']
  want = quantization.expand_layers(layers, lora.AXES)['up_DF']
  np.testing.assert_allclose(merged['layers']['up_DF'], want, atol=1e-6)
