"""Kernels of JAX for one query a row, which read its filled columns alone.

For GPUs, `decode_attention` in Triton: programs of a row share its columns, and
each ends at the last block that the row has filled. For TPUs, `paged_attention`
in Mosaic, for which the columns of a row are pages that follow each other.
Both take a key head of a row as a row of one key head, so that no array is
transposed. Elsewhere they are interpreted, which is slow: tests do so.
"""

import contextlib
import math
import warnings

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import paged_attention
import jax.numpy as jnp

from sharding import mesh as mesh_lib
from sharding import rules
from stages import kernels
from stages.models import transformer

try:
  with warnings.catch_warnings():
    # JAX 0.12 calls it deprecated, and has no other for one query a row.
    warnings.simplefilter('ignore', DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import decode_attention
except ImportError:  # In a later JAX.
  decode_attention = None

BLOCK = 128  # Columns that a program reads at once.
SPLITS = 16  # Most programs that share the columns of a row.
PAGE = 512  # Most columns of a page.
WIDTHS = (16, 32, 64, 128, 256)  # Of heads, for Triton: powers of two.
LANES = 128  # Of TPUs.


def obstacle(
  config: transformer.Config, is_local: bool, kernel: str
) -> str | None:
  """Why a kernel cannot compute some layers of a model; None if it can.

  Args:
    config: the model.
    is_local: whether the layers have a sliding window.
    kernel: a member of `kernels.OF_DECODING`.
  """
  if not rules.is_even('K', config.K):
    return f'devices cannot share {config.K} key-value heads evenly'
  is_here = mesh_lib.platform() in ('gpu', 'tpu')
  if is_here and config.dtype != 'bfloat16':
    # On GPUs, factors in float32 are rounded to 11 bits; on TPUs, keys and
    # values to bfloat16.
    return f'it computes in {config.dtype}, and the kernel in bfloat16'
  if kernel == kernels.DECODE_ATTENTION:
    if decode_attention is None:
      return f'JAX {jax.__version__} no longer has it'
    if config.score_softcap is not None:
      return 'scores have a soft cap'
    if is_here and config.W not in WIDTHS:
      return f'heads have width {config.W}, and not one of {WIDTHS}'
    return None
  if is_local:
    return 'some layers have a sliding window'
  if is_here and config.W % LANES:
    return f'heads have width {config.W}, and not a multiple of {LANES}'
  return None


def block(kernel: str, C: int) -> int:
  """Columns that a kernel reads at once, of caches with C columns."""
  most = BLOCK if kernel == kernels.DECODE_ATTENTION else PAGE
  return math.gcd(most, C)


def splits(C: int) -> int:
  """Programs of `decode_attention` that share C columns of a row."""
  return math.gcd(SPLITS, -(-C // BLOCK))


def attention(
  kernel: str,
  q_MKJW,
  key_MKCW,
  value_MKCW,
  start_M,
  stop_M,
  *,
  scale: float,
  softcap: float | None,
):
  """Attention of a query to columns from `start_M` to `stop_M`, [M, K, J, W].

  Args:
    kernel: a member of `kernels.OF_DECODING`, which `obstacle` says nothing of.
    q_MKJW: queries.
    key_MKCW: keys; C is what `slot_cache.columns` returns.
    value_MKCW: values.
    start_M: the first column of each row; zero for `kernels.PAGED_ATTENTION`.
    stop_M: the column after the last one of each row.
    scale: factor of the scores.
    softcap: cap of the scores; None for `kernels.DECODE_ATTENTION`.
  """
  M, K, J, W = q_MKJW.shape
  C = key_MKCW.shape[2]

  def by_head(x):
    return x.reshape(M * K, *x.shape[2:])

  arrays = [by_head(x) for x in (q_MKJW, key_MKCW, value_MKCW)]
  stop = jnp.repeat(stop_M, K)
  if kernel == kernels.DECODE_ATTENTION:
    seen = decode_attention.mqa(
      *arrays,
      jnp.repeat(start_M, K),
      stop,
      sm_scale=scale,
      block_k=block(kernel, C),
      k_splits=splits(C),
      interpret=mesh_lib.platform() != 'gpu',
    )
  else:
    seen = _paged(*arrays, stop, scale, softcap)
  return seen.reshape(M, K, J, W)


def _paged(q_RJW, key_RCW, value_RCW, stop_R, scale, softcap):
  """The call of `paged_attention`, for rows of one key head."""
  R, C, W = key_RCW.shape
  page = block(kernels.PAGED_ATTENTION, C)
  index = jnp.arange(R * C // page, dtype=jnp.int32).reshape(R, C // page)
  # In float32, as the kernel rounds its sums to the type of the queries after
  # each page.
  q_RJW = q_RJW.astype(jnp.float32) * scale
  here = contextlib.nullcontext()
  if mesh_lib.platform() != 'tpu':
    here = pltpu.force_tpu_interpret_mode()
  with here:
    return paged_attention.paged_attention(
      q_RJW,
      *(x.reshape(1, R * C // page, page, W) for x in (key_RCW, value_RCW)),
      stop_R,
      index,
      pages_per_compute_block=1,
      attn_logits_soft_cap=softcap,
    )
