"""Keys and values that are kept between the turns of conversations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from stages import base
from stages.language.decoding import decode_layer, kv_cache, prefill
from stages.models import transformer
from stages.models.layers import attention, rope


class KeptCache(NamedTuple):
  """Keys and values of completions under way.

  Column 0 belongs to the last token of the prompt, and column t to token t − 1
  of the completion.

  Attributes:
    layers: keys and values, by layer.
    length: columns that hold some, by row; the others are arbitrary.
  """

  layers: tuple[kv_cache.LayerCache, ...]
  length: Int[Array, ' B']


def empty(config: transformer.Config, rows: int, length: int) -> KeptCache:
  """A cache for `rows` completions of `length` tokens, which holds nothing."""
  layers = kv_cache.empty(config, rows, length)
  return KeptCache(layers, jnp.zeros(rows, jnp.int32))


def roll(cache: KeptCache, by_B) -> tuple[kv_cache.LayerCache, ...]:
  """The layers, each row rolled left by its own number of columns."""

  def one(x_KTW, by):
    return jnp.roll(x_KTW, -by, axis=1)

  return jax.tree.map(lambda x: jax.vmap(one)(x, by_B), cache.layers)


def read(
  model: transformer.Transformer,
  params: base.Params,
  layers: Sequence[Any],
  split: prefill.SplitPrompt,
  completions: base.Completions,
  cache: KeptCache,
  max_tokens: int,
) -> KeptCache:
  """Adds the keys and values of tokens that are not in the cache yet.

  The last token of a row stays unread: it is the next input.

  Args:
    model: the model.
    params: its parameters.
    layers: for each layer, its parameters and its prompts' keys and values,
      laid out [N, K, P, W].
    split: the prompts.
    completions: tokens so far.
    cache: keys and values of the first of them.
    max_tokens: most tokens of a row that are not in it.
  """
  length_B = completions.mask.sum(1, dtype=jnp.int32)
  new_BE = cache.length[:, None] + jnp.arange(max_tokens)[None]
  is_new_BE = new_BE < length_B[:, None]

  def run(caches):
    return _read(
      model, params, layers, split, completions, caches, (new_BE, is_new_BE)
    )

  # In the first turn there are none.
  caches = jax.lax.cond(is_new_BE.any(), run, lambda x: x, cache.layers)
  return KeptCache(caches, length_B)


def _read(model, params, layers, split, completions, caches, new):
  """The layers of the cache with the columns `new_BE` where `is_new_BE`."""
  c, (new_BE, is_new_BE) = model.config, new
  B, T = completions.mask.shape
  token_BE = jnp.take_along_axis(
    completions.action, jnp.clip(new_BE - 1, 0, T - 1), 1
  )
  token_BE = jnp.where(new_BE > 0, token_BE, split.token_B[:, None])
  write_BE = jnp.where(is_new_BE, new_BE, T)
  context = _context(c, split, completions, new_BE)
  x_BED = model.apply({'params': params}, token_BE, method='embed')
  row_B1, written = jnp.arange(B)[:, None], []

  def write(old_BKTW, new_BEKW):
    return old_BKTW.at[row_B1, :, write_BE].set(new_BEKW, mode='drop')

  def joined(ahead_NKPW, own_BKTW):
    ahead_BKPW = jnp.repeat(ahead_NKPW, B // ahead_NKPW.shape[0], axis=0)
    return jnp.swapaxes(jnp.concatenate([ahead_BKPW, own_BKTW], 2), 1, 2)

  for i, ((own, key_NKPW, value_NKPW), old) in enumerate(
    zip(layers, caches, strict=True)
  ):
    own = transformer.layer(own)
    cos_BER, sin_BER, mask = context[c.is_local(i)]
    q_BEHW, k_BEKW, v_BEKW = decode_layer.project(
      c, own, x_BED, cos_BER, sin_BER
    )
    now = kv_cache.LayerCache(write(old.key, k_BEKW), write(old.value, v_BEKW))
    seen_BEHW = attention.attention(
      q_BEHW,
      joined(key_NKPW, now.key),
      joined(value_NKPW, now.value),
      mask,
      scale=c.query_scale,
      softcap=c.score_softcap,
      max_live_scores=c.max_live_scores,
    )
    x_BED = decode_layer.finish(c, own, x_BED, seen_BEHW)
    written.append(now)
  return tuple(written)


def _context(
  c: transformer.Config,
  split: prefill.SplitPrompt,
  completions: base.Completions,
  new_BE,
):
  """By whether a layer has a window: angles and mask of new columns."""
  B, T = completions.mask.shape
  group_size = B // split.mask_NP.shape[0]
  position_BE = split.position_B[:, None] + new_BE
  column_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))

  def after_prompt(x_NP, x_BT):
    return jnp.concatenate([jnp.repeat(x_NP, group_size, axis=0), x_BT], 1)

  # A column sees the prompt and the columns up to itself.
  length_B1 = completions.mask.sum(1, dtype=jnp.int32)[:, None]
  is_key_BC = after_prompt(split.mask_NP > 0, column_BT < length_B1)
  block_BC = after_prompt(jnp.zeros_like(split.mask_NP), 1 + column_BT)
  mask = attention.Mask(is_key_BC, attention.Blocks(1 + new_BE, block_BC))
  context = {False: (*rope.angles(c.rope, c.W, position_BE), mask)}
  if c.window is not None:
    near = mask._replace(
      window=jnp.int32(c.window),
      position_BT=position_BE,
      position_BC=after_prompt(
        transformer.positions(split.mask_NP),
        split.position_B[:, None] + column_BT,
      ),
    )
    angles = rope.angles(c.local_rope or c.rope, c.W, position_BE)
    context[True] = (*angles, near)
  return context
