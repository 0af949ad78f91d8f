"""Attention with grouped queries, soft caps and sliding windows."""

import jax
import jax.numpy as jnp

from stages.models import mixed_precision


def soft_cap(x, cap: float | None):
  """cap · tanh(x / cap), which lies within ± `cap`; `x` if it is None."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def within_window(position_BT, position_BC, window: int):
  """Where a key lies among the latest `window` tokens of a query, [B, T, C].

  The token of the query itself counts as one. Later tokens are not excluded.
  """
  return position_BT[:, :, None] - position_BC[:, None] < window


def attention(
  q_BTHW,
  k_BCKW,
  v_BCKW,
  mask_BTC,
  *,
  scale: float | None = None,
  softcap: float | None = None,
):
  """Attention where `mask_BTC` is true, with a softmax in float32 or wider.

  Args:
    q_BTHW: queries.
    k_BCKW: keys.
    v_BCKW: values.
    mask_BTC: where queries attend.
    scale: factor of the scores; 1/√W if None.
    softcap: cap of the scores, as in `soft_cap`, before they are masked.
  """
  if q_BTHW.dtype != jnp.float64 and softcap is None:
    return jax.nn.dot_product_attention(
      q_BTHW, k_BCKW, v_BCKW, mask=mask_BTC[:, None], scale=scale
    )
  # The library has no soft cap, and computes every softmax in float32, an error
  # of 1e-6 in float64.
  B, T, H, W = q_BTHW.shape
  K = k_BCKW.shape[2]
  wide = mixed_precision.wide_dtype(q_BTHW.dtype)
  q_BTKJW = q_BTHW.reshape(B, T, K, H // K, W)
  score_BKJTC = jnp.einsum(
    'BTKJW,BCKW->BKJTC', q_BTKJW, k_BCKW, preferred_element_type=wide
  )
  score_BKJTC *= W**-0.5 if scale is None else scale
  score_BKJTC = soft_cap(score_BKJTC, softcap)
  # Finite: the weights of a row without any key must not become NaN.
  least = jnp.finfo(wide).min / 2
  score_BKJTC = jnp.where(mask_BTC[:, None, None], score_BKJTC, least)
  weight_BKJTC = jax.nn.softmax(score_BKJTC, axis=-1).astype(v_BCKW.dtype)
  seen_BTKJW = jnp.einsum('BKJTC,BCKW->BTKJW', weight_BKJTC, v_BCKW)
  return seen_BTKJW.reshape(B, T, H, W)
