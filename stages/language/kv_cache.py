"""Keys and values while decoding, written one token at a time.

Keys of completions are laid out [B, K, T, W], as a single query reads them.
Keys of prompts stay one row a group; all queries of a group read them at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages.models import attention as attention_lib
from stages.models import mixed_precision, transformer


class LayerCache(NamedTuple):
  """Keys and values of the completions in one layer."""

  key: Float[Array, 'B K T W']
  value: Float[Array, 'B K T W']


def empty(config: transformer.Config, rows: int, length: int):
  """Empty caches of `rows` completions of `length` tokens, by layer."""
  shape = (rows, config.K, length, config.W)
  zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
  return tuple(LayerCache(zeros, zeros) for _ in range(config.L))


def update(cache: LayerCache, t, k_B1KW, v_B1KW) -> LayerCache:
  """Writes the keys and values of token `t`."""

  def write(old, new):
    new = jnp.swapaxes(new, 1, 2)
    return jax.lax.dynamic_update_slice_in_dim(old, new, t, 2)

  return LayerCache(write(cache.key, k_B1KW), write(cache.value, v_B1KW))


def attention(
  config: transformer.Config,
  q_B1HW,
  cache: LayerCache,
  k_NKPW,
  v_NKPW,
  mask_NP,
  past_BT,
  near_BC=None,
):
  """Attention of one query a row to its prompt and to its tokens `past_BT`.

  One softmax covers both parts. Scores are in float32 or wider and never
  rounded to the dtype of the keys; neither is the sum of the two parts.
  `jax.nn.dot_product_attention` would need a copy of the prompt's keys for
  every row of the group at every token.

  Args:
    config: dimensions and settings of the model.
    q_B1HW: queries.
    cache: keys and values of the completions.
    k_NKPW: keys of the prompts.
    v_NKPW: values of the prompts.
    mask_NP: one on tokens of the prompts.
    past_BT: where the cache holds tokens.
    near_BC: tokens of the prompt, then of the cache, within the layer's window;
      None if it has none.
  """
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
  own_BKJT = einsum('BKJW,BKTW->BKJT', q_BKJW, cache.key)
  if config.score_softcap is not None:
    ahead_NKQP, own_BKJT = (
      attention_lib.soft_cap(x * scale, config.score_softcap)
      for x in (ahead_NKQP, own_BKJT)
    )
  ahead_NKQP = jnp.where(mask_NP[:, None, None] > 0, ahead_NKQP, -jnp.inf)
  own_BKJT = jnp.where(past_BT[:, None, None], own_BKJT, -jnp.inf)

  def by_row(x_NKQX):
    x = x_NKQX.reshape(N, K, B // N, J, -1).swapaxes(1, 2)
    return x.reshape(B, K, J, -1)

  def by_group(x_BKJX):
    x = x_BKJX.reshape(N, B // N, K, J, -1).swapaxes(1, 2)
    return x.reshape(N, K, B // N * J, -1)

  score = jnp.concatenate([by_row(ahead_NKQP), own_BKJT], axis=-1)
  if near_BC is not None:
    score = jnp.where(near_BC[:, None, None], score, -jnp.inf)
  if config.score_softcap is None:
    score *= scale
  weight = jax.nn.softmax(score, axis=-1).astype(cache.value.dtype)
  seen_NKQW = einsum('NKQP,NKPW->NKQW', by_group(weight[..., :P]), v_NKPW)
  seen_BKJW = einsum('BKJT,BKTW->BKJW', weight[..., P:], cache.value)
  seen_BKJW += by_row(seen_NKQW)
  return seen_BKJW.astype(q_B1HW.dtype).reshape(B, 1, H, W)


def own_attention(
  config: transformer.Config, q_B1HW, cache: LayerCache, mask_BC
):
  """Attention of one query a row to the columns `mask_BC` of its own cache.

  Each row has a copy of its prompt in the cache. Scores are as in `attention`.
  """
  B, _, H, W = q_B1HW.shape
  K = cache.key.shape[1]
  scale = W**-0.5 if config.query_scale is None else config.query_scale
  q_BKJW = q_B1HW.reshape(B, K, H // K, W)
  wide = mixed_precision.wide_dtype(q_B1HW.dtype)
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  score_BKJC = einsum('BKJW,BKCW->BKJC', q_BKJW, cache.key) * scale
  score_BKJC = attention_lib.soft_cap(score_BKJC, config.score_softcap)
  score_BKJC = jnp.where(mask_BC[:, None, None], score_BKJC, -jnp.inf)
  weight = jax.nn.softmax(score_BKJC, axis=-1).astype(cache.value.dtype)
  seen_BKJW = einsum('BKJC,BKCW->BKJW', weight, cache.value)
  return seen_BKJW.astype(q_B1HW.dtype).reshape(B, 1, H, W)
