"""Architectures of Hugging Face, as configurations of one transformer.

`FAMILIES` decides by the `model_type` of a config.json. `read` translates its
settings and `write` translates them back.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from stages import remat as remat_lib
from stages.models import config as config_lib
from stages.models.files import (
  config_check,
  decoder_names,
  naming,
  rope_settings,
  weights,
)
from stages.models.vision import vision_files

GEMMA = {'unit_offset': True, 'scale_embeddings': True}


class Family(NamedTuple):
  """An architecture.

  Attributes:
    architecture: its class in `transformers`.
    settings: fields of `transformer.Config` that it fixes.
    renamed: checkpoint tensors whose names differ from those of Llama.
    has_vision: whether it has the vision tower of Qwen2.5-VL.
  """

  architecture: str
  settings: Mapping[str, Any] = {}
  renamed: naming.Names = {}
  has_vision: bool = False

  @property
  def names(self) -> naming.Names:
    """The checkpoint tensor of each parameter."""
    return decoder_names.NAMES | self.renamed


FAMILIES = {
  'qwen2': Family('Qwen2ForCausalLM', {'qkv_bias': True}),
  'qwen3': Family('Qwen3ForCausalLM', {'qk_norm': True}),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM', {'qk_norm': True}, decoder_names.EXPERTS
  ),
  'llama': Family('LlamaForCausalLM'),
  'mistral': Family('MistralForCausalLM'),
  'gemma': Family('GemmaForCausalLM', GEMMA),
  'gemma2': Family(
    'Gemma2ForCausalLM', GEMMA | {'post_norms': True}, decoder_names.POST_NORMS
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM',
    GEMMA | {'post_norms': True, 'qk_norm': True},
    decoder_names.POST_NORMS,
  ),
  'qwen2_5_vl': Family(
    'Qwen2_5_VLForConditionalGeneration',
    {'qkv_bias': True},
    {'tower': vision_files.NAMES},
    has_vision=True,
  ),
}
ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}
# Settings of a part of the architectures. `transformers` ignores them in a
# config.json of another one, and other programs may apply them.
OF_SOME = (
  'sliding_window',
  'attn_logit_softcapping',
  'final_logit_softcapping',
  'query_pre_attn_scalar',
  'hidden_activation',
)


def family_of(raw: Any, path) -> Family:
  """The architecture of a config.json.

  Args:
    raw: its content.
    path: where it was read, for errors.

  Raises:
    CheckpointError: if it is another model than those of `FAMILIES`.
  """
  config_check.check_identity(raw, path)
  kind, classes = raw.get('model_type'), raw.get('architectures') or ()
  family = FAMILIES.get(kind)
  if family is None:
    raise weights.CheckpointError(
      f'{path} describes a model of type {kind!r}; {", ".join(FAMILIES)} are '
      'supported.'
    )
  if classes and family.architecture not in classes:
    raise weights.CheckpointError(
      f'{path} describes a {" or ".join(classes)}; of type {kind!r}, '
      f'{family.architecture} is supported.'
    )
  return family


def read(
  raw: dict[str, Any],
  path,
  *,
  dtype: str | None = None,
  remat: str = remat_lib.AUTO,
  attention: str = 'auto',
) -> config_lib.Config:
  """The model that a config.json describes.

  Args:
    raw, path: as in `family_of`.
    dtype: type of the arithmetic; that of the checkpoint if None, or bfloat16
      for one in float16.
    remat, attention: as in `transformer.Config`.

  Raises:
    CheckpointError: for a model or a setting that is not supported.
    ValueError: for a type that is not one of `config.DTYPES`.
  """
  if dtype is not None:
    config_lib.check_dtype(dtype)
  family, vision = family_of(raw, path), None
  if family.has_vision:
    vision = vision_files.read(raw, path)
    raw = vision_files.of_text(raw)
  config_check.check(raw, path)
  try:
    config = _translated(raw, path, family, vision, dtype, remat)
  except (weights.CheckpointError, MemoryError):
    raise
  except Exception as error:  # Strangers' settings, read by another library.
    raise weights.CheckpointError(
      f'{path} does not describe a {family.architecture} ({error!r:.400}): '
      'compare it with the one that was published with the model.'
    ) from error
  return dataclasses.replace(config, attention=attention)


def _translated(
  raw, path, family: Family, vision, dtype, remat
) -> config_lib.Config:
  """The model that the checked settings of a config.json describe."""
  import transformers

  kind = transformers.CONFIG_MAPPING[raw['model_type']]
  # Else `transformers` warns of usual end tokens that a small model lacks.
  no_ends = {'bos_token_id': None, 'eos_token_id': None}
  c = kind.from_dict(config_check.relevant(raw) | no_ends)
  _check(c, path)
  _check_known(raw, c, kind(), path)
  biased = bool(getattr(c, 'attention_bias', False))
  scalar = getattr(c, 'query_pre_attn_scalar', None)
  windows = _windows(c, path)
  rope, local_rope = rope_settings.read(c, path)
  settings = {
    'qkv_bias': biased,
    'out_bias': biased,
    'windows': windows,
    'F': c.intermediate_size,
    **_experts(c),
    **family.settings,
  }
  return config_lib.Config(
    V=c.vocab_size,
    D=c.hidden_size,
    L=c.num_hidden_layers,
    H=c.num_attention_heads,
    K=c.num_key_value_heads,
    W=getattr(c, 'head_dim', None) or c.hidden_size // c.num_attention_heads,
    rope=rope,
    local_rope=local_rope if windows else None,
    max_positions=rope_settings.max_positions(c.max_position_embeddings, rope),
    norm_epsilon=c.rms_norm_eps,
    activation=ACTIVATIONS[_activation(c)],
    query_scale=None if scalar is None else scalar**-0.5,
    score_softcap=getattr(c, 'attn_logit_softcapping', None),
    logit_softcap=getattr(c, 'final_logit_softcapping', None),
    tie_embeddings=c.tie_word_embeddings,
    dtype=dtype or _arithmetic(raw),
    remat=remat,
    init_stddev=c.initializer_range,
    vision=vision,
    **settings,
  )


def _arithmetic(raw: dict[str, Any]) -> str:
  """The type of the arithmetic where none is chosen: that of the weights.

  In place of float16 it is bfloat16, which has the range of float32.
  """
  stored = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
  return 'bfloat16' if stored == 'float16' else stored


def _experts(c) -> dict[str, Any]:
  """Settings of a mixture of experts."""
  if not hasattr(c, 'moe_intermediate_size'):
    return {}
  return {
    'E': c.num_experts,
    'F': c.moe_intermediate_size,
    'experts_per_token': c.num_experts_per_tok,
    'normalize_experts': c.norm_topk_prob,
  }


def _activation(c) -> str:
  return getattr(c, 'hidden_activation', None) or c.hidden_act


def _check(c, path):
  """Refuses settings that the transformer does not have."""
  if _activation(c) not in ACTIVATIONS:
    raise weights.CheckpointError(
      f'{path} wants the activation {_activation(c)!r}; '
      f'{" and ".join(ACTIVATIONS)} are supported.'
    )
  # transformers 5.19 ignores it for Gemma 3, and other programs apply it.
  if c.model_type == 'gemma3_text' and c.attn_logit_softcapping is not None:
    raise weights.CheckpointError(
      f'{path} sets attn_logit_softcapping, which is not supported for Gemma 3.'
    )


def _check_known(raw: dict[str, Any], c, default, path):
  """Refuses settings that the architecture lacks and others have.

  Args:
    raw: the content of a config.json.
    c: what `transformers` reads of it.
    default: its configuration without any settings.
    path: where it was read, for errors.
  """
  nothing = {'hidden_activation': getattr(c, 'hidden_act', None)}
  if raw.get('use_sliding_window') is False:
    nothing['sliding_window'] = raw.get('sliding_window')
  for key in OF_SOME:
    value = raw.get(key)
    if hasattr(default, key) or value in (None, nothing.get(key)):
      continue
    raise weights.CheckpointError(
      f'{path} sets {key} to {value!r:.40}, which a model of type '
      f'{c.model_type!r} does not have: remove the setting, or name the '
      'architecture that was trained.'
    )


def _windows(c, path) -> tuple[int | None, ...]:
  """Window of each layer, as `transformer.Config.windows`."""
  kinds = getattr(c, 'layer_types', None) or ()
  window = getattr(c, 'sliding_window', None)
  if window is None and 'sliding_attention' in kinds:
    raise weights.CheckpointError(
      f'{path} names layers of type sliding_attention (layer_types), and no '
      'sliding_window that they have: set it, or name the layers '
      'full_attention.'
    )
  if window is None:
    return ()
  # Of these architectures, Mistral and Qwen3's mixture have a window without
  # layer types.
  kinds = kinds or ['sliding_attention'] * c.num_hidden_layers
  if len(kinds) != c.num_hidden_layers:
    raise weights.CheckpointError(
      f'{path} names the type of {len(kinds)} layers (layer_types) and has '
      f'{c.num_hidden_layers}.'
    )
  other = set(kinds) - {'sliding_attention', 'full_attention'}
  if other:
    raise weights.CheckpointError(
      f'{path} has layers of type {min(other)!r}; sliding_attention and '
      'full_attention are supported.'
    )
  if 'sliding_attention' not in kinds:
    return ()
  return tuple(window if k == 'sliding_attention' else None for k in kinds)


def write(folder, c: config_lib.Config, model_type: str, **extra):
  """Writes the config.json of a new model, for `transformers` to read.

  Args:
    folder: where to write.
    c: the model.
    model_type: its architecture, a key of `FAMILIES`.
    **extra: more settings, such as ids of special tokens.

  Raises:
    ValueError: if the architecture lacks a setting of the model.
  """
  import transformers

  family = FAMILIES[model_type]
  of_text = vision_files.TEXT if family.has_vision else model_type
  kind = transformers.CONFIG_MAPPING[of_text]
  known = kind().to_dict().keys() | kind.attribute_map.keys()
  written = kind(
    vocab_size=c.V,
    hidden_size=c.D,
    num_hidden_layers=c.L,
    num_attention_heads=c.H,
    num_key_value_heads=c.K,
    head_dim=c.W,
    intermediate_size=c.F,
    rms_norm_eps=c.norm_epsilon,
    rope_parameters=rope_settings.written(c, model_type),
    max_position_embeddings=_meaning(c, 'max_positions'),
    tie_word_embeddings=c.tie_embeddings,
    initializer_range=c.init_stddev,
    dtype=c.dtype,
    architectures=[family.architecture],
    **{k: v for k, v in _optional(c).items() if k in known},
    **extra,
  )
  if family.has_vision:
    written = vision_files.joined(written, c)
  got = read(written.to_dict(), folder, remat=c.remat, attention=c.attention)
  lost = [
    field.name
    for field in dataclasses.fields(c)
    if _meaning(c, field.name) != _meaning(got, field.name)
  ]
  if lost:
    raise ValueError(
      f'A config.json of type {model_type!r} cannot describe this model: its '
      f'{" and ".join(lost)} would be lost.'
    )
  written.save_pretrained(folder)
  if c.vision is not None:
    vision_files.write_processor(folder, c.vision)


def _optional(c: config_lib.Config) -> dict[str, Any]:
  """Settings that only some architectures have."""
  activation = next(k for k, v in ACTIVATIONS.items() if v == c.activation)
  return {
    'attention_bias': c.out_bias,
    'hidden_act': activation,
    'hidden_activation': activation,
    'query_pre_attn_scalar': round(_meaning(c, 'query_scale') ** -2),
    'attn_logit_softcapping': c.score_softcap,
    'final_logit_softcapping': c.logit_softcap,
    'sliding_window': c.window,
    'use_sliding_window': c.window is not None,
    'num_experts': c.E,
    'num_experts_per_tok': c.experts_per_token,
    'norm_topk_prob': c.normalize_experts,
    'moe_intermediate_size': c.F,
    'layer_types': [
      'sliding_attention' if c.is_local(i) else 'full_attention'
      for i in range(c.L)
    ],
  }


def _meaning(c: config_lib.Config, name: str):
  """The value of a field, alike for settings that mean the same."""
  value = getattr(c, name)
  if name == 'query_scale':
    return round(c.W**-0.5 if value is None else value, 9)
  if name == 'max_positions':
    return value or rope_settings.context(c.rope)
  if name == 'windows':
    return value if c.window else ()
  if name == 'rope' and value.kind == 'default':
    return value.kind, value.theta, value.sections
  if name == 'vision' and value is not None:
    # Its pictures are described in a file of their own.
    return dataclasses.replace(value, mean=(0.0,) * 3, std=(1.0,) * 3)
  return value
