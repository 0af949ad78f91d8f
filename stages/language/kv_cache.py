"""Keys and values while decoding: a value, written one token at a time.

A completion's own keys are laid out [B, K, T, W], which is how a single query
reads them; its prompt's keys stay one row a group, and are read by all queries
of the group at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages.models import transformer


class LayerCache(NamedTuple):
  """One layer's memory of the completions so far."""

  key: Float[Array, 'B K T W']
  value: Float[Array, 'B K T W']


def empty(config: transformer.Config, rows: int, length: int):
  """Memory of `rows` completions of at most `length` tokens, by layer."""
  shape = (rows, config.K, length, config.W)
  zeros = jnp.zeros(shape, jnp.dtype(config.dtype))
  return tuple(LayerCache(zeros, zeros) for _ in range(config.L))


def update(cache: LayerCache, t, k_B1KW, v_B1KW) -> LayerCache:
  """Remembers token `t`."""
  return LayerCache(
    *(
      jax.lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), t, 2)
      for old, new in zip(cache, (k_B1KW, v_B1KW), strict=True)
    )
  )


def attention(q_B1HW, cache: LayerCache, past_BT, k_NKPW, v_NKPW, mask_NP):
  """Attention of one query a row to its prompt and to tokens `past_BT`.

  One softmax over both parts, in float32 or wider.
  `jax.nn.dot_product_attention` would need the prompt's keys copied to every
  row of the group at every token.
  """
  B, _, H, W = q_B1HW.shape
  N, K, P, _ = k_NKPW.shape
  J, scale = H // K, W**-0.5
  q_BKJW = q_B1HW.reshape(B, K, J, W)
  # All queries that share a prompt and a key head: [N, K, queries, W].
  q_NKQW = q_BKJW.reshape(N, B // N, K, J, W).swapaxes(1, 2)
  q_NKQW = q_NKQW.reshape(N, K, B // N * J, W)

  wide = jnp.promote_types(q_B1HW.dtype, jnp.float32)
  ahead_NKQP = jnp.einsum('NKQW,NKPW->NKQP', q_NKQW, k_NKPW).astype(wide)
  ahead_NKQP = jnp.where(mask_NP[:, None, None] > 0, ahead_NKQP, -jnp.inf)
  own_BKJT = jnp.einsum('BKJW,BKTW->BKJT', q_BKJW, cache.key)
  own_BKJT = jnp.where(past_BT[:, None, None], own_BKJT.astype(wide), -jnp.inf)

  def by_row(x_NKQX):
    x = x_NKQX.reshape(N, K, B // N, J, -1).swapaxes(1, 2)
    return x.reshape(B, K, J, -1)

  def by_group(x_BKJX):
    x = x_BKJX.reshape(N, B // N, K, J, -1).swapaxes(1, 2)
    return x.reshape(N, K, B // N * J, -1)

  score = jnp.concatenate([by_row(ahead_NKQP), own_BKJT], axis=-1) * scale
  weight = jax.nn.softmax(score, axis=-1).astype(cache.value.dtype)
  seen_NKQW = jnp.einsum('NKQP,NKPW->NKQW', by_group(weight[..., :P]), v_NKPW)
  seen_BKJW = jnp.einsum('BKJT,BKTW->BKJW', weight[..., P:], cache.value)
  seen_BKJW += by_row(seen_NKQW)
  return seen_BKJW.reshape(B, 1, H, W)
