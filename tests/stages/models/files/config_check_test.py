"""Absurd numbers of a config.json are refused before they become shapes."""

import json

import pytest

from stages.models import huggingface
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
]


def load(folder, **settings):
  (folder / 'config.json').write_text(json.dumps(SMALL | settings))
  return huggingface.load_config(folder)


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
