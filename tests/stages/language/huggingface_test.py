"""Configurations of Hugging Face, and round trips of models."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import transformers
from transformers.models.qwen2 import modeling_qwen2

from stages.language import huggingface, language_model, stops
from stages.models import families, transformer
from stages.models.files import weights, weights_writer
from stages.models.layers import rope
import torch_reference

torch = torch_reference.torch
SMALL = transformer.Config(
  V=23,
  D=12,
  L=2,
  H=2,
  K=1,
  W=6,
  F=17,
  rope=rope.RopeConfig(theta=1e4, original_context=99),
  max_positions=99,
)
ROPES = [
  {'rope_type': 'default'},
  {'rope_type': 'linear', 'factor': 2.5},
  {'rope_type': 'yarn', 'factor': 4.0},
  {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 2048,
    'beta_fast': 16.0,
    'beta_slow': 2.0,
    'truncate': False,
  },
  {'rope_type': 'yarn', 'factor': 0.5, 'attention_factor': 1.3},
  {
    'rope_type': 'llama3',
    'factor': 8.0,
    'original_max_position_embeddings': 1024,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
  },
]


def write(folder, **config):
  config = {
    'model_type': 'qwen2',
    'architectures': ['Qwen2ForCausalLM'],
  } | config
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


@pytest.mark.parametrize('settings', ROPES, ids=lambda r: str(list(r.values())))
@pytest.mark.parametrize('width', [6, 128])
@pytest.mark.parametrize('base', [1e4, 1e6])
def test_frequencies_are_those_of_transformers(settings, width, base, tmp_path):
  parameters = {'rope_theta': base, **settings}
  config = transformers.Qwen2Config(
    head_dim=width, max_position_embeddings=4096, rope_parameters=parameters
  )
  config.save_pretrained(tmp_path)
  got, scale = rope.frequencies(huggingface.load_config(tmp_path).rope, width)
  want = modeling_qwen2.Qwen2RotaryEmbedding(config)
  np.testing.assert_allclose(got, want.inv_freq, rtol=1e-6)
  assert scale == pytest.approx(want.attention_scaling, rel=1e-12)


def test_an_unknown_rope_is_refused():
  with pytest.raises(ValueError, match="Rope kind 'curly' is not one of"):
    rope.frequencies(rope.RopeConfig(kind='curly'), 8)


# As Qwen wrote it, long before `rope_parameters`.
PUBLISHED = {
  'attention_dropout': 0.0,
  'bos_token_id': 151643,
  'eos_token_id': 151645,
  'hidden_act': 'silu',
  'hidden_size': 896,
  'initializer_range': 0.02,
  'intermediate_size': 4864,
  'max_position_embeddings': 32768,
  'max_window_layers': 21,
  'num_attention_heads': 14,
  'num_hidden_layers': 24,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-06,
  'rope_theta': 1000000.0,
  'sliding_window': 32768,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.43.1',
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': 151936,
}


def test_a_published_configuration_is_understood(tmp_path):
  want = transformer.Config(
    V=151936,
    D=896,
    L=24,
    H=14,
    K=2,
    W=64,
    F=4864,
    rope=rope.RopeConfig(theta=1e6, original_context=32768),
    max_positions=32768,
    tie_embeddings=True,
    dtype='bfloat16',
  )
  assert huggingface.load_config(write(tmp_path, **PUBLISHED)) == want
  longer = {
    'factor': 4.0,
    'original_max_position_embeddings': 32768,
    'type': 'yarn',
  }
  write(tmp_path, **PUBLISHED, rope_scaling=longer)
  assert huggingface.load_config(
    tmp_path, dtype='float32', remat='nothing_saveable'
  ) == dataclasses.replace(
    want,
    rope=rope.RopeConfig(
      theta=1e6, kind='yarn', factor=4.0, original_context=32768
    ),
    max_positions=4 * 32768,
    dtype='float32',
    remat='nothing_saveable',
  )


REFUSED = {
  "describes a model of type 'mamba'; qwen2, qwen3, qwen3_moe, llama": {
    'model_type': 'mamba'
  },
  "a Qwen2Model; of type 'qwen2', Qwen2ForCausalLM is supported": {
    'architectures': ['Qwen2Model']
  },
  "has layers of type 'chunked_attention'": {
    'use_sliding_window': True,
    'layer_types': ['chunked_attention'] * 24,
  },
  'sets mlp_bias to True, which is not supported': {
    'model_type': 'llama',
    'architectures': ['LlamaForCausalLM'],
    'mlp_bias': True,
  },
  'sets attn_logit_softcapping, which is not supported for Gemma 3': {
    'model_type': 'gemma3_text',
    'architectures': None,
    'attn_logit_softcapping': 50.0,
  },
  'sets use_bidirectional_attention to True': {
    'model_type': 'gemma3_text',
    'architectures': None,
    'use_bidirectional_attention': True,
  },
  'sets is_causal to False': {'is_causal': False},
  'sets rope_interleaved to True': {'rope_interleaved': True},
  "sets sliding_window to 4096, which a model of type 'llama' does not": {
    'model_type': 'llama',
    'architectures': None,
    'sliding_window': 4096,
    'use_sliding_window': None,
  },
  'sets attn_logit_softcapping to 50.0, which': {
    'attn_logit_softcapping': 50.0
  },
  'sets final_logit_softcapping to 30.0, which': {
    'final_logit_softcapping': 30.0
  },
  'sets query_pre_attn_scalar to 144, which': {'query_pre_attn_scalar': 144},
  "sets hidden_activation to 'gelu_pytorch_tanh', which": {
    'hidden_activation': 'gelu_pytorch_tanh'
  },
  'layer_types., and no sliding_window that they have': {
    'model_type': 'gemma2',
    'architectures': None,
    'sliding_window': None,
  },
  "wants the activation 'gelu'; silu and gelu_pytorch_tanh": {
    'hidden_act': 'gelu'
  },
  "wants rope scaling 'dynamic'": {
    'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}
  },
  'sets mscale and mscale_all_dim': {
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 2.0,
      'mscale': 1.0,
      'mscale_all_dim': 0.5,
    }
  },
}


@pytest.mark.parametrize('words', REFUSED)
def test_an_unsupported_model_is_refused(words, tmp_path):
  write(tmp_path, **PUBLISHED | REFUSED[words])
  with pytest.raises(weights.CheckpointError, match=words):
    huggingface.load_config(tmp_path)


def test_a_broken_configuration_is_a_sentence(tmp_path):
  (tmp_path / 'config.json').write_text('{"model_type": "qwen2",')
  with pytest.raises(weights.CheckpointError, match='is not JSON .*again'):
    huggingface.load_config(tmp_path)
  (tmp_path / 'config.json').write_text('["qwen2"]')
  with pytest.raises(weights.CheckpointError, match='it is a list, expected'):
    huggingface.load_config(tmp_path)


def test_end_tokens_are_read_from_either_file(tmp_path):
  assert stops.stop_tokens(tmp_path) == ()
  write(tmp_path)
  assert stops.stop_tokens(tmp_path) == ()
  write(tmp_path, eos_token_id=5)
  assert stops.stop_tokens(tmp_path) == (5,)
  generation = tmp_path / 'generation_config.json'
  generation.write_text('{"eos_token_id": [7, 8]}')
  assert stops.stop_tokens(tmp_path) == (7, 8)
  generation.write_text('{"temperature": 0.7}')
  assert stops.stop_tokens(tmp_path) == (5,)


def make(folder, config=SMALL, seed=0):
  """A new checkpoint, as the warm start makes it."""
  folder.mkdir()
  params = language_model.policy(config, response_length=1).init(
    jax.random.key(seed)
  )
  huggingface.save(folder, params, config, eos_token_id=3)
  return params


@pytest.mark.slow
@pytest.mark.parametrize('tied', [True, False])
def test_a_new_model_can_be_loaded_by_transformers(tied, tmp_path):
  config = dataclasses.replace(SMALL, tie_embeddings=tied, norm_epsilon=1e-5)
  params = make(tmp_path / 'model', config)
  again = huggingface.load_config(tmp_path / 'model')
  # The default rope has no original context.
  assert dataclasses.replace(again, rope=config.rope) == config
  assert (again.rope.kind, again.rope.theta) == ('default', 1e4)
  token = np.random.default_rng(0).integers(0, config.V, (2, 7))
  got = transformer.Transformer(config).apply(
    {'params': params}, token, np.ones_like(token)
  )
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'model', output_loading_info=True
  )
  assert not any(info.values())
  with torch.no_grad():
    want = model(torch.tensor(token)).logits
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  assert stops.stop_tokens(tmp_path / 'model') == (3,)


@pytest.mark.parametrize(
  ('model_type', 'lost'),
  [
    ('llama', {'qkv_bias': True}),
    ('qwen2', {'qk_norm': True, 'post_norms': True}),
    ('gemma2', {'local_rope': rope.RopeConfig(theta=7.0)}),
  ],
)
def test_a_setting_that_would_be_lost_is_refused(model_type, lost, tmp_path):
  family = families.FAMILIES[model_type]
  settings = {'qkv_bias': False, **family.settings}
  if model_type == 'gemma2':
    settings |= {'activation': 'gelu_tanh', 'windows': (3, None)}
  config = dataclasses.replace(SMALL, **settings)
  families.write(tmp_path, config, model_type)
  other = dataclasses.replace(config, **lost)
  with pytest.raises(ValueError, match=f'{" and ".join(lost)} would be lost'):
    families.write(tmp_path, other, model_type)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('stored', ['dtype', 'torch_dtype'])
def test_an_exported_model_can_be_loaded_by_transformers(
  dtype, stored, tmp_path
):
  source = tmp_path / 'source'
  params = make(source)
  config = json.loads((source / 'config.json').read_text())
  del config['dtype']
  (source / 'config.json').write_text(json.dumps(config | {stored: dtype}))
  (source / 'tokenizer.json').write_text('{"some": "tokenizer"}')
  (source / 'optimizer.bin').write_text('of no use')
  trained = jax.tree.map(lambda x: x + 1 / 3, params)
  huggingface.export(tmp_path / 'model', trained, source)
  assert sorted(file.name for file in (tmp_path / 'model').iterdir()) == [
    'config.json',
    'model.safetensors',
    'tokenizer.json',
  ]
  config = huggingface.load_config(tmp_path / 'model')
  assert config.dtype == dtype
  jax.tree.map(
    np.testing.assert_array_equal,
    huggingface.load_params(tmp_path / 'model', config),
    jax.tree.map(lambda x: x.astype(dtype).astype('float32'), trained),
  )
  model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / 'model')
  assert model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize('name', stops.TOKENIZERS)
def test_an_export_has_every_file_of_a_tokenizer(name, tmp_path):
  source, folder = tmp_path / 'source', tmp_path / 'model'
  params = make(source)
  (source / name).write_bytes(b'some tokenizer')
  huggingface.export(folder, params, source)
  assert (folder / name).read_bytes() == b'some tokenizer'


def test_a_model_may_replace_the_one_it_came_from(tmp_path):
  folder = tmp_path / 'model'
  params = make(folder)
  trained = jax.tree.map(lambda x: 2 * x, params)
  huggingface.export(folder, trained, folder)
  jax.tree.map(
    np.testing.assert_array_equal,
    huggingface.load_params(folder, SMALL),
    trained,
  )
  assert [path.name for path in tmp_path.iterdir()] == ['model']


def test_a_full_disk_does_not_lose_the_model(tmp_path, monkeypatch):
  folder = tmp_path / 'model'
  params = make(folder)

  def fill(folder, *args, **kwargs):
    folder.mkdir()
    (folder / weights.SINGLE).write_bytes(b'half')
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(weights_writer, 'save', fill)
    with pytest.raises(OSError, match='No space left'):
      huggingface.export(folder, params, folder)
  jax.tree.map(
    np.testing.assert_array_equal,
    huggingface.load_params(folder, SMALL),
    params,
  )
  huggingface.export(folder, params, folder)
  assert [path.name for path in tmp_path.iterdir()] == ['model']


def test_the_shapes_of_a_policy_are_known_without_its_tensors(tmp_path):
  params = make(tmp_path / 'model')
  (tmp_path / 'model' / weights.SINGLE).unlink()
  policy = huggingface.policy(str(tmp_path / 'model'), response_length=3)
  like = jax.eval_shape(policy.init, jax.random.key(0))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(
    lambda x: (x.shape, x.dtype), params
  )


def test_a_policy_starts_from_its_checkpoint(tmp_path):
  params = make(tmp_path / 'model', seed=4)
  policy = huggingface.policy(str(tmp_path / 'model'), response_length=9)
  jax.tree.map(
    np.testing.assert_array_equal, policy.init(jax.random.key(0)), params
  )
