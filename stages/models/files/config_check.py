"""Checks the numbers of a config.json before anything is made of them.

Checkpoints come from strangers. A size that is a text, negative or absurd is
refused here, in one sentence, before it becomes a shape.
"""

import math
from typing import Any

from stages.models.files import weights

# Whole numbers from 1 to these. They are far above any published model; a
# folder must still hold the tensors of the sizes that it states.
LARGEST = {
  'vocab_size': 2**24,
  'hidden_size': 2**20,
  'num_hidden_layers': 2**12,
  'num_attention_heads': 2**12,
  'num_key_value_heads': 2**12,
  'head_dim': 2**16,
  'intermediate_size': 2**24,
  'moe_intermediate_size': 2**24,
  'num_experts': 2**16,
  'num_experts_per_tok': 2**16,
  'max_position_embeddings': 2**40,
  'sliding_window': 2**40,
}
POSITIVE = (
  'rms_norm_eps',
  'rope_theta',
  'query_pre_attn_scalar',
  'attn_logit_softcapping',
  'final_logit_softcapping',
  'initializer_range',
)
FLAGS = (
  'tie_word_embeddings',
  'attention_bias',
  'norm_topk_prob',
  'use_sliding_window',
)
DTYPES = ('float32', 'bfloat16', 'float16', 'float64')


def check(raw: dict[str, Any], path) -> None:
  """Checks types and ranges, and that heads and experts go together.

  A setting that is missing or null has the default of its architecture.

  Args:
    raw: the content of a config.json.
    path: where it was read, for the error.

  Raises:
    CheckpointError: names all wrong settings.
  """
  faults = [*_of_single_settings(raw)]
  if not faults:
    faults = [*_of_several_settings(raw)]
  if faults:
    raise weights.CheckpointError(
      f'{path} cannot describe a model: {"; ".join(faults)}.'
    )


def _of_single_settings(raw):
  """Yields what is wrong with settings by themselves."""
  for key, largest in LARGEST.items():
    value = raw.get(key)
    if value is not None and not (_is_whole(value) and 1 <= value <= largest):
      yield f'{key} is {value!r:.40}, expected 1 to {largest}'
  for key in POSITIVE:
    value = raw.get(key)
    is_number = _is_whole(value) or isinstance(value, float)
    if value is not None and not (
      is_number and math.isfinite(value) and value > 0
    ):
      yield f'{key} is {value!r:.40}, expected a number above 0'
  for key in FLAGS:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
      yield f'{key} is {value!r:.40}, expected true or false'
  for key in ('dtype', 'torch_dtype'):
    value = raw.get(key)
    if value is not None and value not in DTYPES:
      yield f'{key} is {value!r:.40}, expected one of {", ".join(DTYPES)}'


def _of_several_settings(raw):
  """Yields what is wrong with settings taken together."""
  heads, kv_heads = (
    raw.get(f'num_{kind}_heads') for kind in ('attention', 'key_value')
  )
  width, experts = raw.get('hidden_size'), raw.get('num_experts')
  if heads and kv_heads and heads % kv_heads:
    yield f'{heads} query heads cannot share {kv_heads} key-value heads evenly'
  if heads and width and not raw.get('head_dim') and width % heads:
    yield (
      f'hidden_size {width} cannot be divided among {heads} heads, and no '
      'head_dim is given'
    )
  if experts and (raw.get('num_experts_per_tok') or 0) > experts:
    yield (f'a token goes to {raw["num_experts_per_tok"]} of {experts} experts')


def _is_whole(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)
