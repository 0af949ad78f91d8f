"""Rotary embeddings as Hugging Face's config.json describes them."""

from typing import Any

from stages.models import config as config_lib
from stages.models.files import weights
from stages.models.layers import rope

KINDS = ('default', 'linear', 'yarn', 'llama3')


def read(c, path) -> tuple[rope.RopeConfig, rope.RopeConfig | None]:
  """Rotary embeddings of layers without and with a window (None if equal).

  Args:
    c: a configuration of `transformers`.
    path: where it was read, for errors.

  Raises:
    CheckpointError: for a kind or a setting that is not supported.
  """
  r = c.rope_parameters
  if 'full_attention' not in r:
    return _rope(r, c, path), None
  whole = _rope(r['full_attention'], c, path)
  local = _rope(r['sliding_attention'], c, path)
  return whole, local if local != whole else None


def _rope(r, c, path) -> rope.RopeConfig:
  """The rotary embedding that `rope_parameters` describe."""
  kind = r.get('rope_type', 'default')
  if kind not in KINDS:
    raise weights.CheckpointError(
      f'{path} wants rope scaling {kind!r}; {sorted(KINDS)} are supported.'
    )
  if r.get('partial_rotary_factor', 1.0) != 1.0:
    raise weights.CheckpointError(
      f'{path} rotates a part of each head (partial_rotary_factor), which is '
      'not supported.'
    )
  original = (
    r.get('original_max_position_embeddings') or c.max_position_embeddings
  )
  attention = r.get('attention_factor')
  if attention is None and r.get('mscale') and r.get('mscale_all_dim'):
    raise weights.CheckpointError(
      f'{path} sets mscale and mscale_all_dim, which are not supported: set '
      'attention_factor instead.'
    )
  return rope.RopeConfig(
    theta=r['rope_theta'],
    kind=kind,
    factor=r.get('factor') or c.max_position_embeddings / original,
    original_context=original,
    beta_fast=r.get('beta_fast') or 32.0,
    beta_slow=r.get('beta_slow') or 1.0,
    truncate=r.get('truncate', True),
    attention_factor=attention,
    low_freq_factor=r.get('low_freq_factor') or 1.0,
    high_freq_factor=r.get('high_freq_factor') or 4.0,
    sections=tuple(r.get('mrope_section') or ()),
  )


def context(config: rope.RopeConfig) -> int:
  """Tokens of context, after the extension where it is declared apart."""
  longer = config.kind in ('yarn', 'llama3')
  return round(config.original_context * (config.factor if longer else 1))


def max_positions(declared: int, config: rope.RopeConfig) -> int | None:
  """Tokens that a model was made for; None where that is not known.

  Extended by YaRN, some declare the context that they had before. Extended
  linearly, some declare that and others what it became.

  Args:
    declared: max_position_embeddings.
    config: the rotary embedding of layers that attend to all tokens.
  """
  return None if config.kind == 'linear' else max(declared, context(config))


def written(c: config_lib.Config, model_type: str) -> dict[str, Any]:
  """Settings of the rotary embedding, by type of layer for Gemma 3."""

  def parameters(x):
    keys = {
      'default': (),
      'linear': ('factor',),
      'yarn': ('factor', 'beta_fast', 'beta_slow', 'truncate'),
      'llama3': ('factor', 'low_freq_factor', 'high_freq_factor'),
    }[x.kind]
    found = {key: getattr(x, key) for key in keys}
    if x.kind in ('yarn', 'llama3'):
      found['original_max_position_embeddings'] = x.original_context
    if x.attention_factor is not None:
      found['attention_factor'] = x.attention_factor
    if x.sections:
      found['mrope_section'] = [*x.sections]
    return {'rope_type': x.kind, 'rope_theta': x.theta} | found

  if model_type != 'gemma3_text':
    return parameters(c.rope)
  return {
    'full_attention': parameters(c.rope),
    'sliding_attention': parameters(c.local_rope or c.rope),
  }
