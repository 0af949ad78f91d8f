"""Checks the settings of a config.json before anything is made of them.

Checkpoints come from strangers. A size that is a text, negative or absurd is
refused here, in one sentence, before it becomes a shape.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import math
from typing import Any, NamedTuple

from stages.models.files import weights


class Kind(NamedTuple):
  """The values that a setting may have.

  Attributes:
    expected: describes them, for messages.
    holds: whether a value is one of them.
  """

  expected: str
  holds: Callable[[Any], bool]


def _is_whole(value) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value) -> bool:
  is_number = _is_whole(value) or isinstance(value, float)
  # A whole number may be too large for isfinite.
  return is_number and 0 < value < math.inf and value <= 1e300


def size(most: int, least: int = 1) -> Kind:
  return Kind(
    f'{least} to {most}', lambda x: _is_whole(x) and least <= x <= most
  )


def list_of(kind: type, words: str) -> Kind:
  return Kind(
    f'a list of {words}',
    lambda x: isinstance(x, list) and all(type(y) is kind for y in x),
  )


def _either(*values) -> Kind:
  return Kind(
    f'one of {", ".join(map(str, values))}',
    lambda x: isinstance(x, str) and x in values,
  )


POSITIVE = Kind('a number above 0', _is_positive)
FLAG = Kind('true or false', lambda x: isinstance(x, bool))
TEXT = Kind('a text', lambda x: isinstance(x, str))
OBJECT = Kind('an object', lambda x: isinstance(x, dict))
TOKENS = Kind(
  'a whole number of at least 0, or a list of them',
  lambda x: all(
    _is_whole(y) and y >= 0 for y in (x if isinstance(x, list) else [x])
  ),
)
DTYPE = _either('float32', 'bfloat16', 'float16', 'float64')

# Settings that name the architecture.
IDENTITY = {'model_type': TEXT, 'architectures': list_of(str, 'texts')}
# The most of each size are far above any published model; a folder must still
# hold the tensors of the sizes that it states.
SETTINGS = IDENTITY | {
  'vocab_size': size(2**24),
  'hidden_size': size(2**20),
  'num_hidden_layers': size(2**12),
  'num_attention_heads': size(2**12),
  'num_key_value_heads': size(2**12),
  'head_dim': size(2**16),
  'intermediate_size': size(2**24),
  'moe_intermediate_size': size(2**24),
  'num_experts': size(2**16),
  'num_local_experts': size(2**16),
  'num_experts_per_tok': size(2**16),
  'max_position_embeddings': size(2**40),
  'sliding_window': size(2**40),
  'sliding_window_pattern': size(2**12),
  '_sliding_window_pattern': size(2**12),
  'decoder_sparse_step': size(2**12),
  'max_window_layers': size(2**12, 0),
  'rms_norm_eps': POSITIVE,
  'rope_theta': POSITIVE,
  'rope_local_base_freq': POSITIVE,
  'partial_rotary_factor': POSITIVE,
  'query_pre_attn_scalar': POSITIVE,
  'attn_logit_softcapping': POSITIVE,
  'final_logit_softcapping': POSITIVE,
  'initializer_range': POSITIVE,
  'tie_word_embeddings': FLAG,
  'attention_bias': FLAG,
  'mlp_bias': FLAG,
  'norm_topk_prob': FLAG,
  'use_sliding_window': FLAG,
  'use_bidirectional_attention': FLAG,
  'hidden_act': TEXT,
  'hidden_activation': TEXT,
  'dtype': DTYPE,
  'torch_dtype': DTYPE,
  'layer_types': list_of(str, 'texts'),
  'mlp_only_layers': list_of(int, 'whole numbers'),
  'rope_scaling': OBJECT,
  'rope_parameters': OBJECT,
}
# Settings of a classifier, and end tokens, which are read apart.
OTHERS = {
  'id2label': OBJECT,
  'num_labels': size(2**20),
  'eos_token_id': TOKENS,
}
ROPE = {
  'rope_type': TEXT,
  'type': TEXT,
  'rope_theta': POSITIVE,
  'factor': POSITIVE,
  'original_max_position_embeddings': size(2**40),
  'beta_fast': POSITIVE,
  'beta_slow': POSITIVE,
  'truncate': FLAG,
  'attention_factor': POSITIVE,
  'low_freq_factor': POSITIVE,
  'high_freq_factor': POSITIVE,
  'mscale': POSITIVE,
  'mscale_all_dim': POSITIVE,
  'partial_rotary_factor': POSITIVE,
  'mrope_section': list_of(int, 'whole numbers'),
}
# Settings that would change the model, with the values that change nothing.
REFUSED = {
  'mlp_bias': (False,),
  'decoder_sparse_step': (1,),
  'mlp_only_layers': ([],),
  'use_bidirectional_attention': (False,),
  'is_causal': (True,),
  'rope_interleaved': (False,),
}
LAYERS = 'full_attention', 'sliding_attention'


def check(raw: Any, path) -> None:
  """Checks types and ranges, and that heads and experts go together.

  A setting that is missing or null has the default of its architecture.

  Args:
    raw: the content of a config.json.
    path: where it was read, for the error.

  Raises:
    CheckpointError: names all wrong settings.
  """
  check_identity(raw, path)
  faults = [*wrong(raw, SETTINGS | OTHERS)]
  for key in ('rope_scaling', 'rope_parameters'):
    if isinstance(raw.get(key), dict):
      faults += _of_rope(raw[key], key)
  if not faults:
    faults = [*_of_several_settings(raw)]
  _refuse(path, faults)
  for key, allowed in REFUSED.items():
    if raw.get(key) is not None and raw[key] not in allowed:
      raise weights.CheckpointError(
        f'{path} sets {key} to {raw[key]!r:.40}, which is not supported.'
      )


def check_identity(raw: Any, path) -> None:
  """As `check`, but of the settings that decide about the architecture."""
  if not isinstance(raw, dict):
    _refuse(path, [f'it is a {type(raw).__name__}, expected an object'])
  _refuse(path, wrong(raw, IDENTITY))


def check_end_tokens(raw: Any, path, vocabulary: int | None) -> None:
  """Checks that the end tokens of a file are tokens of the model.

  Args:
    raw: the content of a config.json or generation_config.json.
    path: where it was read, for the error.
    vocabulary: its size, where the file does not state it.

  Raises:
    CheckpointError: if one of them is not.
  """
  if not isinstance(raw, dict):
    _refuse(path, [f'it is a {type(raw).__name__}, expected an object'])
  kinds = {'eos_token_id': TOKENS, 'vocab_size': SETTINGS['vocab_size']}
  _refuse(path, wrong(raw, kinds))
  most, ids = raw.get('vocab_size') or vocabulary, raw.get('eos_token_id')
  ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
  if most is not None and max(ids, default=0) >= most:
    _refuse(
      path,
      [f'its end token {max(ids)} is none of its {most} tokens from 0'],
    )


def relevant(raw: Mapping[str, Any]) -> dict[str, Any]:
  """The settings of a config.json that say what the model computes."""
  return {key: value for key, value in raw.items() if key in SETTINGS}


def _refuse(path, faults: Iterable[str]) -> None:
  if faults := [*faults]:
    raise weights.CheckpointError(
      f'{path} cannot describe a model: {"; ".join(faults)}.'
    )


def wrong(
  raw: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str = ''
) -> Iterator[str]:
  """Yields what is wrong with settings by themselves, in a sentence each."""
  for key, kind in kinds.items():
    value = raw.get(key)
    if value is not None and not kind.holds(value):
      yield f'{prefix}{key} is {value!r:.40}, expected {kind.expected}'


def _of_rope(rope: Mapping[str, Any], key: str) -> Iterator[str]:
  """Yields what is wrong with a rotary embedding, or those of two layers."""
  kinds = [kind for kind in LAYERS if kind in rope]
  if not kinds:
    yield from wrong(rope, ROPE, f'{key}.')
    low, high = rope.get('low_freq_factor'), rope.get('high_freq_factor')
    if _is_positive(low) and _is_positive(high) and low >= high:
      yield f'{key}.low_freq_factor is {low}, expected below {high}'
    return
  for kind in LAYERS:
    inner = rope.get(kind)
    if isinstance(inner, dict):
      yield from wrong(inner, ROPE, f'{key}.{kind}.')
    else:
      yield f'{key}.{kind} is {inner!r:.40}, expected an object'


def _of_several_settings(raw: Mapping[str, Any]) -> Iterator[str]:
  """Yields what is wrong with settings taken together."""
  heads, kv_heads = (
    raw.get(f'num_{kind}_heads') for kind in ('attention', 'key_value')
  )
  width, head = raw.get('hidden_size'), raw.get('head_dim')
  experts = raw.get('num_experts') or raw.get('num_local_experts')
  layers, kinds = raw.get('num_hidden_layers'), raw.get('layer_types')
  if heads and kv_heads and heads % kv_heads:
    yield f'{heads} query heads cannot share {kv_heads} key-value heads evenly'
  if heads and width and not head and width % heads:
    yield (
      f'hidden_size {width} cannot be divided among {heads} heads, and no '
      'head_dim is given'
    )
  elif heads and width and (head or width // heads) % 2:
    yield (
      f'a head has {head or width // heads} dimensions, and rotary embeddings '
      'need an even number'
    )
  if experts and (raw.get('num_experts_per_tok') or 0) > experts:
    yield (f'a token goes to {raw["num_experts_per_tok"]} of {experts} experts')
  if layers and kinds and len(kinds) != layers:
    yield f'layer_types names {len(kinds)} layers of {layers}'
  if raw.get('quantization_config'):
    yield (
      'its weights are quantized (quantization_config): take the model in '
      'bfloat16, of which it was made'
    )
