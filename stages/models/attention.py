"""Attention with grouped queries, soft caps and sliding windows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stages.models import mixed_precision


class Context(NamedTuple):
  """Positions of a packed group, and what each of them attends to.

  Attributes:
    cos_NSR: cosine of the angle of every position.
    sin_NSR: sine of it.
    mask_NPP: where prompts attend to themselves.
    mask_BTC: where completions attend: to their prompt, then to themselves;
      None without completions.
  """

  cos_NSR: Array
  sin_NSR: Array
  mask_NPP: Array
  mask_BTC: Array | None


class PromptCache(NamedTuple):
  """Keys and values of prompts, stacked over layers, one row a group.

  Attributes:
    key: rotated keys, [L, N, P, K, W].
    value: values, [L, N, P, K, W].
  """

  key: Array
  value: Array


def soft_cap(x, cap: float | None):
  """cap · tanh(x / cap), which lies within ± `cap`; `x` if it is None."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def within_window(position_BT, position_BC, window: int):
  """Mask [B, T, C] of keys among the latest `window` tokens of a query.

  The token of the query itself counts as one. Later tokens are not excluded.
  """
  return position_BT[:, :, None] - position_BC[:, None] < window


def causal(position_NP, mask_NP, window: int | None = None):
  """Mask [N, P, P] of padded prompts: earlier and real tokens only."""
  P = mask_NP.shape[1]
  mask_NPP = jnp.tri(P, dtype=bool)[None] & (mask_NP[:, None] > 0)
  if window is not None:
    mask_NPP &= within_window(position_NP, position_NP, window)
  return mask_NPP


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
