"""Splash attention, JAX's kernel for TPUs, in the layouts of this project.

Scores of a block of queries and keys stay in the chip's own memory, in the
backward pass, too. Blocks of later keys are skipped. Elsewhere than on a TPU,
the kernel is interpreted, which is slow: tests do so.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from sharding import mesh as mesh_lib
from sharding import row_map

LANES = 128  # Sequences are padded to a multiple of it.
BLOCKS = (512, 256, LANES)
PADDING = -1
DTYPES = ('bfloat16', 'float32')


def obstacle(q_BTHW) -> str | None:
  """Why the kernel cannot read such queries; None if it can."""
  if q_BTHW.dtype not in DTYPES:
    return f'it computes in {q_BTHW.dtype}, and the kernel in {DTYPES}'
  return None


def attention(
  q_BTHW,
  k_BCKW,
  v_BCKW,
  segment_BC,
  *,
  scale: float | None = None,
  softcap: float | None = None,
):
  """Causal attention, [B, T, H, W], computed by each device for its heads.

  The last of C keys is that of the last of T queries. A query attends to keys
  of its own segment up to its own, so that padding attends to padding.

  Args:
    q_BTHW: queries.
    k_BCKW: keys.
    v_BCKW: values.
    segment_BC: segment of each key; −1 on padding.
    scale: factor of the scores; 1/√W if None.
    softcap: cap of the scores, as in `attention.soft_cap`.
  """
  scale = q_BTHW.shape[-1] ** -0.5 if scale is None else scale
  local = functools.partial(
    _local,
    softcap=softcap,
    interpret=mesh_lib.platform() != 'tpu',
  )
  # Rounded once more: the kernel has no scale.
  q_BTHW = (q_BTHW.astype(jnp.float32) * scale).astype(q_BTHW.dtype)
  return row_map.map_heads(local, q_BTHW, k_BCKW, v_BCKW, segment_BC)


def _local(q_BTHW, k_BCKW, v_BCKW, segment_BC, *, softcap, interpret):
  """Attention of a device's own rows and heads."""
  (_, T, H, _), C = q_BTHW.shape, k_BCKW.shape[1]
  # Padded to t and c. Keys are padded in front, too, so that the last query's
  # key stays the last one.
  behind = -T % LANES
  front = -(C + behind) % LANES

  def pad(x, front, value=0):
    widths = [(0, 0), (front, behind)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=value)

  q_BHtW = pad(q_BTHW, 0).swapaxes(1, 2)
  k_BKcW = pad(k_BCKW, front).swapaxes(1, 2)
  v_BKcW = pad(v_BCKW, front).swapaxes(1, 2)
  segment_Bc = pad(segment_BC, front, PADDING)
  t, c = T + behind, front + C + behind
  kernel = _kernel(t, c, H, softcap, interpret)
  segment = splash_attention.SegmentIds(segment_Bc[:, c - t :], segment_Bc)
  seen_BHtW = jax.vmap(kernel)(q_BHtW, k_BKcW, v_BKcW, segment)
  return seen_BHtW.swapaxes(1, 2)[:, :T]


def _kernel(T: int, C: int, H: int, softcap: float | None, interpret: bool):
  """The kernel of `H` heads, for multiples of `LANES` queries and keys."""
  q, kv = (next(b for b in BLOCKS if not n % b) for n in (T, C))
  mask = splash_attention.CausalMask((T, C), offset=C - T)
  return splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([mask] * H),
    block_sizes=splash_attention.BlockSizes(
      block_q=q,
      block_kv=kv,
      block_q_dkv=q,
      block_kv_dkv=kv,
      block_q_dq=q,
      block_kv_dq=kv,
    ),
    attn_logits_soft_cap=softcap,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
