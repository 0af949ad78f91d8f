"""Qwen2 and Qwen2.5: loading and exporting Hugging Face checkpoints."""

from collections.abc import Callable
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp

from stages import base
from stages.language import language_model, sample
from stages.models import rope as rope_lib
from stages.models import transformer, weights
from stages.models.weights import Tensor

NAMES = {
  'embed_VD': Tensor('model.embed_tokens.weight'),
  'unembed_DV': Tensor('lm_head.weight', 1),
  'norm_D': Tensor('model.norm.weight'),
  'before_attention_D': Tensor('model.layers.{i}.input_layernorm.weight'),
  'before_feedforward_D': Tensor(
    'model.layers.{i}.post_attention_layernorm.weight'
  ),
  'query_DHW': Tensor('model.layers.{i}.self_attn.q_proj.weight', 1),
  'key_DKW': Tensor('model.layers.{i}.self_attn.k_proj.weight', 1),
  'value_DKW': Tensor('model.layers.{i}.self_attn.v_proj.weight', 1),
  'out_HWD': Tensor('model.layers.{i}.self_attn.o_proj.weight', 2),
  'query_bias_HW': Tensor('model.layers.{i}.self_attn.q_proj.bias', 0),
  'key_bias_KW': Tensor('model.layers.{i}.self_attn.k_proj.bias', 0),
  'value_bias_KW': Tensor('model.layers.{i}.self_attn.v_proj.bias', 0),
  'gate_DF': Tensor('model.layers.{i}.mlp.gate_proj.weight', 1),
  'up_DF': Tensor('model.layers.{i}.mlp.up_proj.weight', 1),
  'down_FD': Tensor('model.layers.{i}.mlp.down_proj.weight', 1),
}
# Files of a checkpoint beside its tensors, which `export` copies.
COMPANIONS = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'generation_config.json',
)


def _rope(c, path) -> rope_lib.RopeConfig:
  """The rotary embedding of a configuration."""
  r = c.rope_parameters
  kind = r.get('rope_type', 'default')
  known = {'default', 'linear', 'yarn', 'llama3'}
  if kind not in known:
    raise weights.CheckpointError(
      f'{path} wants rope scaling {kind!r}; {sorted(known)} are supported.'
    )
  original = (
    r.get('original_max_position_embeddings') or c.max_position_embeddings
  )
  factor = r.get('factor') or c.max_position_embeddings / original
  attention = r.get('attention_factor')
  if attention is None and r.get('mscale') and r.get('mscale_all_dim'):
    raise weights.CheckpointError(
      f'{path} sets mscale and mscale_all_dim, which are not supported: set '
      'attention_factor instead.'
    )
  return rope_lib.RopeConfig(
    theta=r['rope_theta'],
    kind=kind,
    factor=factor,
    original_context=original,
    beta_fast=r.get('beta_fast') or 32.0,
    beta_slow=r.get('beta_slow') or 1.0,
    truncate=r.get('truncate', True),
    attention_factor=attention,
    low_freq_factor=r.get('low_freq_factor', 1.0),
    high_freq_factor=r.get('high_freq_factor', 4.0),
  )


def load_config(
  checkpoint: str | pathlib.Path, *, dtype: str | None = None, remat='none'
) -> transformer.Config:
  """The model configuration in a checkpoint's config.json.

  Args:
    checkpoint: folder of a Hugging Face checkpoint.
    dtype: type of the arithmetic; that of the checkpoint if None.
    remat: as in `transformer.Config`.

  Raises:
    CheckpointError: if the folder is missing, or holds another kind of model.
  """
  path = pathlib.Path(checkpoint) / 'config.json'
  if not path.is_file():
    raise weights.CheckpointError(
      f'There is no checkpoint at {checkpoint}: {path} was not found. Give the '
      'folder of a Qwen2 or Qwen2.5 model in Hugging Face format.'
    )
  try:
    raw = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise weights.CheckpointError(
      f'{path} is not JSON ({error}): copy it again.'
    ) from error
  kind = raw.get('model_type') if isinstance(raw, dict) else None
  if kind != 'qwen2':
    raise weights.CheckpointError(
      f'{path} describes a model of type {kind!r}; Qwen2 and '
      "Qwen2.5, type 'qwen2', are supported."
    )
  import transformers

  c = transformers.Qwen2Config.from_dict(raw)
  if c.use_sliding_window:
    raise weights.CheckpointError(
      f'{path} uses sliding-window attention, which is not supported: set '
      'use_sliding_window to false if its context never exceeds the window.'
    )
  if c.hidden_act != 'silu':
    raise weights.CheckpointError(
      f'{path} wants the activation {c.hidden_act!r}; silu is supported.'
    )
  stored = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
  return transformer.Config(
    V=c.vocab_size,
    D=c.hidden_size,
    L=c.num_hidden_layers,
    H=c.num_attention_heads,
    K=c.num_key_value_heads,
    W=raw.get('head_dim') or c.hidden_size // c.num_attention_heads,
    F=c.intermediate_size,
    rope=_rope(c, path),
    norm_epsilon=c.rms_norm_eps,
    tie_embeddings=c.tie_word_embeddings,
    dtype=dtype or stored,
    remat=remat,
    init_stddev=c.initializer_range,
  )


def stop_tokens(checkpoint: str | pathlib.Path) -> tuple[int, ...]:
  """Ids of end tokens, from generation_config.json or config.json."""
  folder, ids = pathlib.Path(checkpoint), None
  for name in ('config.json', 'generation_config.json'):
    if (folder / name).is_file():
      ids = json.loads((folder / name).read_text()).get('eos_token_id', ids)
  ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
  return tuple(ids)


def load_params(checkpoint: str | pathlib.Path, config: transformer.Config):
  """The parameters of a checkpoint."""
  # Some checkpoints of tied models store the embedding a second time.
  ignored = frozenset({'lm_head.weight'} if config.tie_embeddings else ())
  return weights.load(
    checkpoint, transformer.param_shapes(config), NAMES, ignored=ignored
  )


def policy(
  checkpoint: str,
  *,
  response_length: int,
  sampling: sample.Sampling = sample.Sampling(),
  dtype: str | None = None,
  remat: str = 'none',
  max_live_logits: int = language_model.MAX_LIVE_LOGITS,
  engine: Callable[..., base.Policy] | None = None,
) -> base.Policy:
  """A policy from a checkpoint.

  Args:
    checkpoint: folder of a Qwen2 or Qwen2.5 model in Hugging Face format.
    response_length: maximum tokens of a completion.
    sampling: distribution to sample from.
    dtype: type of the arithmetic; that of the checkpoint if None.
    remat: as in `transformer.Config`.
    max_live_logits: as in `language_model.policy`.
    engine: an engine that generates in place of the model, such as vLLM:
      `policy, *, checkpoint, config, names, response_length, stop, sampling ->
      policy`; None to generate with the model itself.
  """
  config = load_config(checkpoint, dtype=dtype, remat=remat)

  def init(key):
    if isinstance(key, jax.core.Tracer):  # Only shapes are needed.
      return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), transformer.param_shapes(config)
      )
    return load_params(checkpoint, config)

  settings = {
    'response_length': response_length,
    'stop': stop_tokens(checkpoint),
    'sampling': sampling,
  }
  own = language_model.policy(
    config, **settings, init=init, max_live_logits=max_live_logits
  )
  if engine is None:
    return own
  return engine(
    own, checkpoint=checkpoint, config=config, names=NAMES, **settings
  )


def save_config(folder: pathlib.Path, c: transformer.Config, **extra):
  """Writes the config.json of a new model, for `transformers` to read."""
  import transformers

  if c.rope.kind != 'default' or not c.qkv_bias:
    raise ValueError(
      'A config.json is written for models with the default rope and biases, '
      f'as Qwen2.5 has; this one has rope {c.rope.kind!r} and '
      f'qkv_bias={c.qkv_bias}.'
    )
  transformers.Qwen2Config(
    vocab_size=c.V,
    hidden_size=c.D,
    num_hidden_layers=c.L,
    num_attention_heads=c.H,
    num_key_value_heads=c.K,
    head_dim=c.W,
    intermediate_size=c.F,
    rms_norm_eps=c.norm_epsilon,
    rope_parameters={'rope_type': 'default', 'rope_theta': c.rope.theta},
    tie_word_embeddings=c.tie_embeddings,
    initializer_range=c.init_stddev,
    dtype=c.dtype,
    architectures=['Qwen2ForCausalLM'],
    **extra,
  ).save_pretrained(folder)


def export(folder: str | pathlib.Path, params, checkpoint: str | pathlib.Path):
  """Writes trained parameters as a checkpoint that `transformers` loads.

  Args:
    folder: folder to write.
    params: parameters of the model; written in the type of `checkpoint`.
    checkpoint: the original model, for its configuration and tokenizer.
  """
  folder, source = pathlib.Path(folder), pathlib.Path(checkpoint)
  # Write beside the folder, then rename: it may be the original checkpoint, and
  # an interrupted export must leave it as it was.
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  config = json.loads((source / 'config.json').read_text())
  dtype = config.pop('torch_dtype', None) or config.get('dtype', 'float32')
  weights.save(part, params, NAMES, dtype=dtype)
  config['dtype'] = dtype
  (part / 'config.json').write_text(json.dumps(config, indent=2))
  for name in COMPANIONS:
    if (source / name).exists():
      shutil.copy(source / name, part / name)
  shutil.rmtree(folder, ignore_errors=True)
  part.replace(folder)
