"""Absurd numbers of a config.json are refused before they become shapes."""

import json

import pytest

from stages.language import huggingface
from stages.models import families
from stages.models.files import config_check, weights

SMALL = {
  'model_type': 'qwen2',
  'architectures': ['Qwen2ForCausalLM'],
  'vocab_size': 97,
  'hidden_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
}
WRONG = [
  (key, value)
  for key in ('vocab_size', 'hidden_size', 'num_hidden_layers')
  for value in (0, -1, 10**30, '24', 2.5, True, [24], {'a': 1})
]
WRONG += [
  ('num_hidden_layers', 10**9),
  ('num_attention_heads', -4),
  ('num_key_value_heads', 0),
  ('head_dim', 'wide'),
  ('intermediate_size', 1e300),
  ('max_position_embeddings', -5),
  ('rms_norm_eps', 0),
  ('rms_norm_eps', 'small'),
  ('rms_norm_eps', float('nan')),
  ('rope_theta', -1.0),
  ('rope_theta', float('inf')),
  ('initializer_range', -0.02),
  ('tie_word_embeddings', 'yes'),
  ('tie_word_embeddings', 1),
  ('dtype', 'int8'),
  ('torch_dtype', 16),
  ('torch_dtype', ['float32']),
  ('model_type', []),
  ('model_type', {'qwen2': 1}),
  ('architectures', 5),
  ('architectures', 'Qwen2ForCausalLM'),
  ('architectures', [['Qwen2ForCausalLM']]),
  ('rope_scaling', 5),
  ('rope_scaling', 'linear'),
  ('rope_parameters', ['linear']),
  ('layer_types', 7),
  ('layer_types', [1, 2]),
  ('hidden_act', ['a']),
  ('hidden_act', 3),
  ('num_local_experts', 10**9),
  ('max_window_layers', -1),
  ('num_labels', 10**9),
  ('id2label', [0]),
  ('eos_token_id', -1),
  ('eos_token_id', '</s>'),
  ('eos_token_id', [2, None]),
  ('mlp_only_layers', 3),
  ('decoder_sparse_step', '1'),
]
ROPES = [
  ('factor', 'four'),
  ('factor', -2.0),
  ('factor', 0),
  ('factor', float('nan')),
  ('rope_type', 3),
  ('rope_theta', '1e6'),
  ('original_max_position_embeddings', 4096.5),
  ('original_max_position_embeddings', -1),
  ('beta_fast', [32]),
  ('truncate', 'no'),
  ('attention_factor', float('inf')),
  ('high_freq_factor', {}),
]


def load(folder, **settings):
  (folder / 'config.json').write_text(json.dumps(SMALL | settings))
  return huggingface.load_config(folder)


def test_refused_memory_is_not_blamed_on_the_file(tmp_path, monkeypatch):
  def refuse(*args, **kwargs):
    raise MemoryError

  monkeypatch.setattr(families, '_translated', refuse)
  with pytest.raises(MemoryError):
    load(tmp_path)


@pytest.mark.parametrize('key', ['dtype', 'torch_dtype'])
def test_a_model_in_float16_is_computed_in_bfloat16(key, tmp_path):
  assert load(tmp_path, **{key: 'float16'}).dtype == 'bfloat16'
  assert load(tmp_path, **{key: 'float32'}).dtype == 'float32'
  with pytest.raises(ValueError, match='^Arithmetic in float16 is not'):
    huggingface.load_config(tmp_path, dtype='float16')


def test_a_right_configuration_is_read(tmp_path):
  config = load(tmp_path, head_dim=None, sliding_window=None)
  assert (config.D, config.L, config.W) == (24, 2, 6)


@pytest.mark.parametrize(('key', 'value'), WRONG)
def test_a_wrong_setting_is_refused_by_its_name(key, value, tmp_path):
  with pytest.raises(weights.CheckpointError) as error:
    load(tmp_path, **{key: value})
  assert str(error.value).startswith(
    f'{tmp_path}/config.json cannot describe a model: {key} is '
  )
  assert len(str(error.value)) < 400


@pytest.mark.parametrize(('key', 'value'), ROPES)
@pytest.mark.parametrize('outer', ['rope_scaling', 'rope_parameters'])
def test_a_wrong_rotary_embedding_is_refused(outer, key, value, tmp_path):
  rope = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 2.0, key: value}
  for path, settings in {
    outer: rope,
    f'{outer}.full_attention': {
      'full_attention': rope,
      'sliding_attention': {},
    },
  }.items():
    with pytest.raises(weights.CheckpointError) as error:
      load(tmp_path, **{outer: settings})
    assert f'model: {path}.{key} is {value!r}, expected ' in str(error.value)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('[]', 'it is a list, expected an object'),
    ('"qwen2"', 'it is a str, expected an object'),
    ('null', 'it is a NoneType, expected an object'),
    ('[' * 10**5, 'is not JSON'),
    ('{"vocab_size": ' + '9' * 5000 + '}', 'is not JSON'),
    ('{"model_type": "qwen2"', 'is not JSON'),
    ('', 'is not JSON'),
    (b'\xff\xfe', 'is not JSON'),
    (json.dumps(SMALL | {'vocab_size': None}), 'vocab_size'),
    (json.dumps(SMALL | {'hidden_size': None}), 'hidden_size'),
    (json.dumps(SMALL | {'hidden_act': None}), 'hidden_act'),
    (json.dumps(SMALL | {'hidden_act': 'relu'}), "activation 'relu'"),
    (json.dumps(SMALL | {'layer_types': ['full_attention']}), 'names 1 layers'),
    (json.dumps(SMALL | {'quantization_config': {'bits': 4}}), 'are quantized'),
    (
      json.dumps(SMALL | {'rope_parameters': {'full_attention': {}}}),
      'rope_parameters.sliding_attention is None, expected an object',
    ),
    (
      json.dumps(
        SMALL | {'rope_scaling': {'low_freq_factor': 4, 'high_freq_factor': 1}}
      ),
      'rope_scaling.low_freq_factor is 4, expected below 1',
    ),
  ],
)
def test_a_hostile_configuration_is_a_sentence(text, words, tmp_path):
  path = tmp_path / 'config.json'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(weights.CheckpointError, match=words) as error:
    huggingface.load_config(tmp_path)
  assert str(error.value).startswith(str(path))
  assert len(str(error.value)) < 800


def test_settings_that_compute_nothing_are_not_looked_at(tmp_path):
  config = load(tmp_path, transformers_version=[], auto_map=3, bos_token_id='x')
  assert config == load(tmp_path)


def test_all_wrong_settings_are_named_at_once(tmp_path):
  with pytest.raises(weights.CheckpointError) as error:
    load(tmp_path, hidden_size='24', num_hidden_layers=-1)
  assert "hidden_size is '24', expected 1 to 1048576;" in str(error.value)
  assert 'num_hidden_layers is -1, expected 1 to 4096.' in str(error.value)


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'num_key_value_heads': 3}, '4 query heads cannot share 3 key-value'),
    ({'hidden_size': 25}, 'hidden_size 25 cannot be divided among 4 heads'),
  ],
)
def test_sizes_that_do_not_go_together_are_refused(settings, words, tmp_path):
  with pytest.raises(weights.CheckpointError, match=words):
    load(tmp_path, **settings)


def test_a_token_goes_to_no_more_experts_than_there_are():
  with pytest.raises(weights.CheckpointError, match='goes to 9 of 8 experts'):
    config_check.check({'num_experts': 8, 'num_experts_per_tok': 9}, 'x')
