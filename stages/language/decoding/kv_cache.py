"""Keys and values while decoding, written one token at a time.

Keys of completions are laid out [B, K, T, W], as a single query reads them.
Keys of prompts stay one row a group; all queries of a group read them at once.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages.language.decoding import decode_layer
from stages.models import transformer
from stages.models.layers import attention as attention_lib
from stages.models.layers import mixed_precision


class LayerCache(NamedTuple):
  """Keys and values of the completions in one layer."""

  key: Float[Array, 'B K T W']
  value: Float[Array, 'B K T W']


def empty(config: transformer.Config, rows: int, length: int, fill=0):
  """Empty caches of `rows` completions of `length` tokens, by layer.

  Args:
    config: dimensions of the model.
    rows: of each cache.
    length: columns of each cache.
    fill: their first value, which no mask lets through.
  """
  shape = (rows, config.K, length, config.W)
  filled = jnp.full(shape, fill, jnp.dtype(config.dtype))
  return tuple(LayerCache(filled, filled) for _ in range(config.L))


def empty_after(before, config: transformer.Config, *sizes: tuple[int, int]):
  """Empty caches that XLA makes only after it has computed other arrays.

  Zeros need no input, so that XLA for GPUs writes them at the start of a
  program. Caches would then take memory while prompts are read, beside gathered
  parameters that are freed before decoding begins.

  Args:
    before: a tree of the other arrays.
    config: dimensions of the model.
    *sizes: rows and length, as `empty` takes them, of each set of caches.

  Returns:
    `before`, and the caches by layer for each of `sizes`.
  """
  zero = jnp.zeros((), jnp.dtype(config.dtype))
  before, zero = jax.lax.optimization_barrier((before, zero))
  return before, *(empty(config, *some, fill=zero) for some in sizes)


def update(cache: LayerCache, t, k_B1KW, v_B1KW, open_B=None) -> LayerCache:
  """Writes the keys and values of token `t`; in rows `open_B`, if given."""

  def write(old, new):
    new = jnp.swapaxes(new, 1, 2)
    if open_B is not None:
      now = jax.lax.dynamic_slice_in_dim(old, t, 1, 2)
      new = jnp.where(open_B[:, None, None, None], new, now)
    return jax.lax.dynamic_update_slice_in_dim(old, new, t, 2)

  return LayerCache(write(cache.key, k_B1KW), write(cache.value, v_B1KW))


@decode_layer.traced_once
def attention(
  config: transformer.Config,
  q_B1HW,
  cache: LayerCache,
  k_NKPW,
  v_NKPW,
  mask_NP,
  past_BS,
  near_BC=None,
  earlier: Sequence[LayerCache] = (),
):
  """Attention of one query a row to its prompt and to its tokens `past_BS`.

  One softmax covers all parts. Scores are in float32 or wider and never
  rounded to the dtype of the keys; neither is the sum of the parts.
  `jax.nn.dot_product_attention` would need a copy of the prompt's keys for
  every row of the group at every token.

  Args:
    config: dimensions and settings of the model.
    q_B1HW: queries.
    cache: keys and values of the completions, of their latest columns.
    k_NKPW: keys of the prompts.
    v_NKPW: values of the prompts.
    mask_NP: one on tokens of the prompts.
    past_BS: where the columns of all caches, end to end, hold tokens.
    near_BC: tokens of the prompt, then of the caches, within the layer's
      window; None if it has none.
    earlier: caches of the columns before those of `cache`.
  """
  caches = (*earlier, cache)
  B, _, H, W = q_B1HW.shape
  N, K, P, _ = k_NKPW.shape
  J = H // K
  scale = W**-0.5 if config.query_scale is None else config.query_scale
  q_BKJW = q_B1HW.reshape(B, K, J, W)
  # All queries that share a prompt and a key head: [N, K, queries, W].
  q_NKQW = q_BKJW.reshape(N, B // N, K, J, W).swapaxes(1, 2)
  q_NKQW = q_NKQW.reshape(N, K, B // N * J, W)

  wide = mixed_precision.wide_dtype(q_B1HW.dtype)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  ahead_NKQP = einsum('NKQW,NKPW->NKQP', q_NKQW, k_NKPW)
  own_BKJS = jnp.concatenate(
    [einsum('BKJW,BKTW->BKJT', q_BKJW, part.key) for part in caches], axis=-1
  )
  if config.score_softcap is not None:
    ahead_NKQP, own_BKJS = (
      attention_lib.soft_cap(x * scale, config.score_softcap)
      for x in (ahead_NKQP, own_BKJS)
    )
  ahead_NKQP = jnp.where(mask_NP[:, None, None] > 0, ahead_NKQP, -jnp.inf)
  own_BKJS = jnp.where(past_BS[:, None, None], own_BKJS, -jnp.inf)

  def by_row(x_NKQX):
    x = x_NKQX.reshape(N, K, B // N, J, -1).swapaxes(1, 2)
    return x.reshape(B, K, J, -1)

  def by_group(x_BKJX):
    x = x_BKJX.reshape(N, B // N, K, J, -1).swapaxes(1, 2)
    return x.reshape(N, K, B // N * J, -1)

  score = jnp.concatenate([by_row(ahead_NKQP), own_BKJS], axis=-1)
  if near_BC is not None:
    score = jnp.where(near_BC[:, None, None], score, -jnp.inf)
  if config.score_softcap is None:
    score *= scale
  weight = jax.nn.softmax(score, axis=-1).astype(cache.value.dtype)
  seen_NKQW = einsum('NKQP,NKPW->NKQW', by_group(weight[..., :P]), v_NKPW)
  seen_BKJW, start = by_row(seen_NKQW), P
  for part in caches:
    T = part.key.shape[2]
    own_BKJT = weight[..., start : start + T]
    seen_BKJW += einsum('BKJT,BKTW->BKJW', own_BKJT, part.value)
    start += T
  return seen_BKJW.astype(q_B1HW.dtype).reshape(B, 1, H, W)
