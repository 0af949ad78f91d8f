"""Keys and values of rows in slots: the prompt of a row, then its completion.

The columns of a slot are filled from the first one on, and those of two slots
to different numbers. A kernel of the hardware reads of each slot its filled
columns alone. Without a kernel, all slots are read as far as the longest row
needs on a CPU, and whole elsewhere.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import layout
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding import mesh as mesh_lib
from sharding import row_map
from stages import core, kernels
from stages.language.decoding.kv_cache import LayerCache
from stages.language.decoding.slots import decode_kernels
from stages.models import transformer
from stages.models.layers import attention as attention_lib
from stages.models.layers import mixed_precision

BLOCK = decode_kernels.BLOCK
# Launches in a layer: the kernel, and what joins its programs' results.
KERNELS = 5
# Without a kernel: two products, the maximum, the weights and their sum.
XLA_KERNELS = 6
OPERATIONS = 5  # On each score: scaled, masked, subtracted, exp, added.
SHORTEST = 2 * BLOCK  # Columns from which on a kernel is worth its launch.


class Span(NamedTuple):
  """The columns to read in a layer, after each row has written its next one.

  Attributes:
    start_M: the first column that a row attends to.
    stop_M: the first one that it does not, which follows its latest token.
    first: the first column that any unfinished row attends to.
    last: the first one that none does.
  """

  start_M: Array
  stop_M: Array
  first: Array
  last: Array


def columns(tokens: int) -> int:
  """The columns for rows of `tokens`, which kernels can divide in blocks.

  Whole blocks, in multiples of a 16th of the columns at least, of which as many
  programs as that can each read some.
  """
  if tokens <= BLOCK:
    return tokens
  unit = BLOCK
  while unit * decode_kernels.SPLITS < tokens and unit < BLOCK * 16:
    unit *= 2
  return -(-tokens // unit) * unit


def span(size_M, is_open_M, window: int | None) -> Span:
  """The columns to read once each row has written column `size_M`.

  Args:
    size_M: columns that each slot has filled so far.
    is_open_M: whether the slot holds an unfinished row.
    window: the latest tokens that a layer attends to; None for all.
  """
  stop_M = size_M + 1
  start_M = jnp.zeros_like(stop_M)
  if window is not None:
    start_M = jnp.maximum(stop_M - window, 0)
  last = jnp.where(is_open_M, stop_M, 0).max()
  first = jnp.where(is_open_M, start_M, last).min()
  return Span(start_M, stop_M, first, last)


def choose_kernel(
  config: transformer.Config, count: int, is_local: bool
) -> kernels.Choice:
  """Chooses what reads the cache in some layers, and says why no kernel does.

  Args:
    config: the model.
    count: columns of a slot.
    is_local: whether these layers have a sliding window.
  """
  obstacle = functools.partial(decode_kernels.obstacle, config, is_local)
  is_short = count < SHORTEST
  return kernels.choose_for_decoding(config.attention, obstacle, is_short)


def attention_work(
  config: transformer.Config, length: int, params, prompt, *_
) -> core.AttentionWork:
  """The work of attention in slots, on the platform traced for.

  Args:
    config: the model.
    length: most tokens of a completion.
    params: its parameters, as a policy's `act` takes them.
    prompt: prompts, likewise.
  """
  del params
  P = prompt.token.shape[1]
  C = columns(P + length)
  local = sum(config.is_local(i) for i in range(config.L))
  kinds = {True: local, False: config.L - local}
  work = tuple(
    _column_work(config, C, layers, is_local)
    for is_local, layers in kinds.items()
    if layers
  )
  writes_scores = any(some.reads != 'own' for some in work)
  return core.AttentionWork(P, work, writes_scores)


def _column_work(
  config: transformer.Config, C: int, layers: int, is_local: bool
) -> core.ColumnWork:
  """The work of some layers, for caches of `C` columns."""
  kernel = choose_kernel(config, C, is_local).name
  item = jnp.dtype(config.dtype).itemsize
  wide = jnp.dtype(mixed_precision.wide_dtype(config.dtype)).itemsize
  window = config.window if is_local else math.inf
  reads, most, block = 'all', C, 1
  bytes_, operations, kernels_ = 2 * config.K * config.W * item, 0, KERNELS
  if kernel in kernels.OF_DECODING:
    reads, block = 'own', decode_kernels.block(kernel, C)
    # A program reads its part of the columns from the first one on.
    most = window + (C // decode_kernels.splits(C) - 1) / 2
  else:
    if kernel == kernels.BLOCKS and C > BLOCK:
      reads, most, block = 'longest', math.inf, BLOCK
    # Scores are written, and read for their maximum, their sum and the weights,
    # which are written and read.
    bytes_ += config.H * (4 * wide + 2 * item)
    operations = config.H * OPERATIONS
    kernels_ = XLA_KERNELS
  starts = is_local and reads == 'longest'  # These are rounded, too.
  return core.ColumnWork(
    reads=reads,
    most=most,
    window=window,
    beyond=(block - 1) / 2 * (1 + starts),
    matmul_flops=4 * layers * config.H * config.W,
    other_flops=layers * operations,
    dtype=config.dtype,
    bytes=layers * bytes_,
    kernels=layers * kernels_,
  )


def enter(cache: LayerCache, prompt: LayerCache, mask_NP, n, m) -> LayerCache:
  """The cache with prompt `n` in slot `m`, its tokens in the first columns.

  Args:
    cache: of a layer, [M, K, C, W].
    prompt: keys and values of the prompts, [N, K, P, W].
    mask_NP: 1 on their tokens.
    n: number of the prompt.
    m: number of the slot.
  """
  # Tokens before padding; what follows them is overwritten.
  order_P = jnp.argsort(mask_NP[n] == 0, stable=True)

  def put(x_MKCW, prompt_NKPW):
    prompt_1KPW = jax.lax.dynamic_slice_in_dim(prompt_NKPW, n, 1, axis=0)
    prompt_1KPW = jnp.take(prompt_1KPW, order_P, axis=2)
    x_MKCW = jax.lax.dynamic_update_slice(
      x_MKCW, prompt_1KPW.astype(x_MKCW.dtype), (m, 0, 0, 0)
    )
    if mesh_lib.platform() == 'tpu':
      # Else the cache gets the layout of the prompts, whose heads come last,
      # and every iteration copies it for the kernel.
      return layout.with_layout_constraint(x_MKCW, layout.Layout((0, 1, 2, 3)))
    return x_MKCW

  return LayerCache(put(cache.key, prompt.key), put(cache.value, prompt.value))


@functools.partial(mesh_lib.jitted, static_argnums=(0, 1), inline=True)
def extend(
  config: transformer.Config,
  kernel: str,
  cache: LayerCache,
  q_M1HW,
  k_M1KW,
  v_M1KW,
  some: Span,
) -> tuple[LayerCache, Array]:
  """Writes the next token of each row, and attends to it and those before it.

  Scores are in float32 or wider. Each device writes and reads its own heads:
  XLA cannot divide the work of a kernel, and would gather heads to write them.

  Args:
    config: dimensions and settings of the model.
    kernel: what reads the cache, the name of a choice of `choose_kernel`.
    cache: keys and values of the layer, [M, K, C, W].
    q_M1HW: queries.
    k_M1KW: keys of the same tokens.
    v_M1KW: their values.
    some: the columns to read.

  Returns:
    The cache, and what the queries see, [M, 1, H, W].
  """
  M, _, H, W = q_M1HW.shape
  K = cache.key.shape[1]
  q_MKJW = q_M1HW.reshape(M, K, H // K, W)
  *cache, seen_MKJW = row_map.map_key_heads(
    functools.partial(_extend, config, kernel),
    (q_MKJW, k_M1KW[:, 0], v_M1KW[:, 0], *cache),
    some,
  )
  return LayerCache(*cache), seen_MKJW.reshape(M, 1, H, W)


def _extend(
  config: transformer.Config,
  kernel: str,
  q_MKJW,
  k_MKW,
  v_MKW,
  key_MKCW,
  value_MKCW,
  some: Span,
):
  """As `extend`, for the heads of a device."""
  cache = LayerCache(
    _write(key_MKCW, k_MKW, some.stop_M - 1),
    _write(value_MKCW, v_MKW, some.stop_M - 1),
  )
  if kernel in kernels.OF_DECODING:
    seen_MKJW = decode_kernels.attention(
      kernel,
      q_MKJW,
      *cache,
      some.start_M,
      some.stop_M,
      scale=_scale(config),
      softcap=config.score_softcap,
    )
  else:
    seen_MKJW = _attend(config, kernel, q_MKJW, cache, some)
  return *cache, seen_MKJW.astype(q_MKJW.dtype)


def _write(x_MKCW, new_MKW, column_M):
  """Writes one column of each slot, in place.

  Columns are numbered through all slots and heads. With three indices, TPUs'
  compiler wants another layout, into which it would copy the whole cache.
  """
  M, K, C, W = x_MKCW.shape
  at_MK = jnp.arange(M * K).reshape(M, K) * C + column_M[:, None]
  x = x_MKCW.reshape(M * K * C, W)
  x = x.at[at_MK.reshape(-1)].set(
    new_MKW.astype(x.dtype).reshape(-1, W),
    indices_are_sorted=True,
    unique_indices=True,
    mode='promise_in_bounds',
  )
  return x.reshape(x_MKCW.shape)


def _scale(config: transformer.Config) -> float:
  return config.W**-0.5 if config.query_scale is None else config.query_scale


class Softmax(NamedTuple):
  """A softmax over the keys that have been read, and the values that it sees.

  Attributes:
    largest: the largest score.
    total: the sum of exp(score - largest).
    seen: the sum of values, weighted by exp(score - largest).
  """

  largest: Float[Array, 'M K J']
  total: Float[Array, 'M K J']
  seen: Float[Array, 'M K J W']


def _attend(config, kernel: str, q_MKJW, cache: LayerCache, some: Span):
  """Attention without a kernel, to blocks of columns or to all of them."""
  C = cache.key.shape[2]
  wide = mixed_precision.wide_dtype(q_MKJW.dtype)
  # Finite: a difference of infinite scores is NaN.
  least = jnp.full(q_MKJW.shape[:-1], jnp.finfo(wide).min / 2, wide)
  start = Softmax(least, jnp.zeros_like(least), jnp.zeros_like(q_MKJW, wide))
  if kernel == kernels.BLOCKS and C > BLOCK:

    def body(i, softmax):
      block = (
        jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, 2) for x in cache
      )
      return _read(config, q_MKJW, softmax, LayerCache(*block), some, i * BLOCK)

    blocks = some.first // BLOCK, -(-some.last // BLOCK)
    softmax = jax.lax.fori_loop(*blocks, body, start)
  else:
    softmax = _read(config, q_MKJW, start, cache, some, 0)
  # Of an empty slot, there may be nothing.
  total_MKJ = jnp.where(softmax.total > 0, softmax.total, 1)
  return softmax.seen / total_MKJ[..., None]


def _read(
  config, q_MKJW, softmax: Softmax, cache: LayerCache, some: Span, at
) -> Softmax:
  """Adds some columns to a softmax, arXiv:1805.02867 algorithm 3.

  Args:
    config: dimensions and settings of the model.
    q_MKJW: queries.
    softmax: of the columns before.
    cache: the columns, [M, K, c, W].
    some: the columns that rows attend to.
    at: number of the first of these.
  """
  wide = softmax.total.dtype
  einsum = functools.partial(jnp.einsum, preferred_element_type=wide)
  score_MKJC = einsum('MKJW,MKCW->MKJC', q_MKJW, cache.key) * _scale(config)
  score_MKJC = attention_lib.soft_cap(score_MKJC, config.score_softcap)
  column_1C = at + jnp.arange(cache.key.shape[2])[None]
  is_seen_MC = column_1C >= some.start_M[:, None]
  is_seen_MC &= column_1C < some.stop_M[:, None]
  least = jnp.finfo(wide).min / 2
  score_MKJC = jnp.where(is_seen_MC[:, None, None], score_MKJC, least)
  largest = jnp.maximum(softmax.largest, score_MKJC.max(-1))
  weight_MKJC = jnp.exp(score_MKJC - largest[..., None])
  factor = jnp.exp(softmax.largest - largest)
  weight = weight_MKJC.astype(cache.value.dtype)
  seen_MKJW = einsum('MKJC,MKCW->MKJW', weight, cache.value)
  return Softmax(
    largest,
    softmax.total * factor + weight_MKJC.sum(-1),
    softmax.seen * factor[..., None] + seen_MKJW,
  )
