"""Positions of a model: how many it has, and longer texts that are refused."""

import json

import jax
import numpy as np
import pytest

from stages import base
from stages.language import huggingface, language_model
from stages.models import families, transformer

SMALL = transformer.Config(
  V=23, D=12, L=2, H=2, K=1, W=6, F=17, max_positions=16
)


@pytest.mark.parametrize(
  ('scaling', 'want'),
  [
    (None, 4096),
    ({'rope_type': 'yarn', 'factor': 4.0}, 16384),
    # As Llama 3.1, which declares more than its factor times what it had.
    (
      {
        'rope_type': 'llama3',
        'factor': 8.0,
        'original_max_position_embeddings': 256,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
      },
      4096,
    ),
    ({'rope_type': 'linear', 'factor': 2.0}, None),
  ],
)
def test_positions_are_those_after_an_extension(scaling, want, tmp_path):
  settings = {
    'model_type': 'qwen2',
    'architectures': ['Qwen2ForCausalLM'],
    'hidden_size': 12,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'rope_theta': 1e6,
    'max_position_embeddings': 4096,
    'rope_scaling': scaling,
  }
  (tmp_path / 'config.json').write_text(json.dumps(settings))
  config = huggingface.load_config(tmp_path)
  assert config.max_positions == want
  families.write(tmp_path / 'again', config, 'qwen2')
  assert huggingface.load_config(tmp_path / 'again').max_positions == want


@pytest.mark.parametrize(('prompt', 'length'), [(9, 8), (1, 16), (16, 1)])
def test_more_tokens_than_a_model_has_positions_are_refused(
  prompt, length, tmp_path
):
  policy = language_model.policy(SMALL, response_length=length)
  params = policy.init(jax.random.key(0))
  key_B = jax.random.split(jax.random.key(1), 2)

  def prompts(P):
    return base.Prompt(np.ones((2, P), np.int32), np.ones((2, P), np.float32))

  said = f'up to {prompt} tokens and a completion of up to {length} need'
  if prompt + length > 16:
    with pytest.raises(ValueError, match=said):
      policy.act(params, prompts(prompt), key_B)
    with pytest.raises(ValueError, match=said):
      policy.evaluate(params, prompts(prompt), np.ones((2, length), np.int32))
  if length < 16:
    policy.act(params, prompts(16 - length), key_B)
  families.write(tmp_path, SMALL, 'qwen2')
  assert huggingface.load_config(tmp_path).max_positions == 16
