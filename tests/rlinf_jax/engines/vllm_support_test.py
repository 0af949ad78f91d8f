"""Models that vLLM would compute in another way are refused, by name."""

import importlib.util

import pytest

from rlinf_jax.engines import vllm
from stages.language import sample
from stages.models import families, transformer

SMALL = {'V': 23, 'D': 12, 'L': 2, 'H': 2, 'K': 1, 'W': 6, 'F': 17}
REFUSED = {
  'not tried with mixtures of experts': (
    'qwen3_moe',
    {'qk_norm': True, 'E': 3, 'experts_per_token': 2, 'qkv_bias': False},
  ),
  'no bias at the output of the attention of Qwen3': (
    'qwen3',
    {'qk_norm': True, 'out_bias': True},
  ),
  'uses the embedding as the output layer of Gemma 2': (
    'gemma2',
    {
      'qkv_bias': False,
      'activation': 'gelu_tanh',
      'unit_offset': True,
      'post_norms': True,
      'scale_embeddings': True,
      'tie_embeddings': False,
    },
  ),
  'not tried with the sliding windows of Qwen2': (
    'qwen2',
    {'windows': (None, 3)},
  ),
  'here 2 heads of width 8 are in a model of width 12': ('qwen2', {'W': 8}),
}


@pytest.mark.parametrize('words', REFUSED)
def test_a_model_that_vllm_would_get_wrong_is_refused(
  words, tmp_path, monkeypatch
):
  model_type, settings = REFUSED[words]
  config = transformer.Config(**SMALL | settings)
  families.write(tmp_path, config, model_type)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  with pytest.raises(ValueError, match=f'{words}: leave the engine out'):
    vllm.engine(
      None,
      checkpoint=str(tmp_path),
      config=config,
      names=families.NAMES,
      response_length=3,
      stop=(),
      sampling=sample.Sampling(),
    )
