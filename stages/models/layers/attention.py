"""Attention with grouped queries, soft caps and sliding windows.

For long sequences, the scores [B, H, T, C] of `attention` are never all in
memory: on TPUs and GPUs a kernel computes them where it can (`_obstacle`), and
elsewhere they are computed for some queries at a time. `bidirectional`, for the
short sequences of pictures, has all scores in memory where it has no kernel.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sharding import rules
from stages import kernels
from stages.models.layers import cudnn, mixed_precision, splash

# Scores on a device at once: 2^26 are 256 MiB in float32.
MAX_LIVE_SCORES = 2**26
# The fewest keys for which a kernel is worth its padding.
SHORTEST = 128
# Operations of attention carry this name in compiled programs.
SCOPE = 'attention'


class Segment(NamedTuple):
  """The group and the completion of each position of packed rows.

  Attributes:
    group: number of its group; −1 on padding.
    row: number of its completion; −1 in a prompt, which all completions of its
      group attend to. None if no group has more than one completion.
  """

  group: Array
  row: Array | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal:
  """Each query attends to the keys up to its own.

  The last of C keys is that of the last of T queries, so query t attends to the
  keys up to number t + C − T.
  """


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Bidirectional:
  """Each query attends to all keys."""


class Blocks(NamedTuple):
  """Each query attends to all keys of its block and of the blocks before it.

  Attributes:
    query_BT: number of each query's block.
    key_BC: number of each key's block.
  """

  query_BT: Array
  key_BC: Array


class Mask(NamedTuple):
  """A mask of the keys of each query, not yet expanded to [B, T, C].

  The result of a query whose own key is padding is arbitrary.

  Attributes:
    key_BC: true on keys of tokens, false on padding.
    order: how far a query attends to later keys. Its type is known while a
      model is traced, so that a kernel can be chosen by it.
    window: number of latest tokens that a query attends to, itself included;
      None for all.
    position_BT: positions of the queries, if there is a window.
    position_BC: positions of the keys, if there is a window.
    segment_BT: group and completion of the queries, if rows are packed.
    segment_BC: group and completion of the keys, if rows are packed.
  """

  key_BC: Array
  order: Causal | Bidirectional | Blocks = Causal()
  window: Array | None = None
  position_BT: Array | None = None
  position_BC: Array | None = None
  segment_BT: Segment | None = None
  segment_BC: Segment | None = None

  def dense(self, T: int, start=0, length: int | None = None):
    """The mask [B, length, C] of the queries from `start` on, of T in all.

    Args:
      T: number of all queries.
      start: number of the first query.
      length: number of queries; None for all T.
    """
    length = T if length is None else length
    C = self.key_BC.shape[1]

    def queries(x_BT):
      return jax.lax.dynamic_slice_in_dim(x_BT, start, length, axis=1)

    match self.order:
      case Blocks() as blocks:
        # More queries than T, if the last chunk of them is padded.
        block_Bt = queries(blocks.query_BT)
        mask_BtC = blocks.key_BC[:, None] <= block_Bt[:, :, None]
      case Causal():
        last_t = start + jnp.arange(length) + C - T
        mask_BtC = (jnp.arange(C)[None] <= last_t[:, None])[None]
      case Bidirectional():
        mask_BtC = jnp.ones((1, length, C), bool)
    mask_BtC &= self.key_BC[:, None]
    if self.window is not None:
      mask_BtC &= within_window(
        queries(self.position_BT), self.position_BC, self.window
      )
    if self.segment_BT is not None:
      mask_BtC &= same_segment(
        jax.tree.map(queries, self.segment_BT), self.segment_BC
      )
    return mask_BtC


def causal(is_key_BC, window: int | None, position_BT, position_BC) -> Mask:
  """The mask of queries and keys at given positions, which count no padding."""
  mask = Mask(is_key_BC)
  if window is None:
    return mask
  return mask._replace(
    window=jnp.int32(window), position_BT=position_BT, position_BC=position_BC
  )


class Context(NamedTuple):
  """Positions of a packed group, and what each of them attends to.

  Attributes:
    cos_NSR: cosine of the angle of every position.
    sin_NSR: sine of it.
    prompt: where prompts attend to themselves.
    completion: where completions attend: to their prompt, then to themselves;
      None without completions.
  """

  cos_NSR: Array
  sin_NSR: Array
  prompt: Mask
  completion: Mask | None = None


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


def within_window(position_BT, position_BC, window):
  """Mask [B, T, C] of keys among the latest `window` tokens of a query.

  The token of the query itself counts as one. Later tokens are not excluded.
  """
  return position_BT[:, :, None] - position_BC[:, None] < window


def same_segment(query_BT: Segment, key_BC: Segment):
  """Mask [B, T, C] of keys in the prompt or in the completion of a query."""
  is_group = query_BT.group[:, :, None] == key_BC.group[:, None]
  if key_BC.row is None:
    return is_group
  is_row = query_BT.row[:, :, None] == key_BC.row[:, None]
  return is_group & (is_row | (key_BC.row < 0)[:, None])


@jax.named_scope(SCOPE)
def attention(
  q_BTHW,
  k_BCKW,
  v_BCKW,
  mask: Mask,
  *,
  scale: float | None = None,
  softcap: float | None = None,
  implementation: str = kernels.AUTO,
  max_live_scores: int = MAX_LIVE_SCORES,
):
  """Attention with a softmax in float32 or wider, [B, T, H, W].

  Args:
    q_BTHW: queries.
    k_BCKW: keys.
    v_BCKW: values.
    mask: where queries attend.
    scale: factor of the scores; 1/√W if None.
    softcap: cap of the scores, as in `soft_cap`, before they are masked.
    implementation: a member of `kernels.SETTINGS`. Whichever it is, the result
      is the same but for rounding.
    max_live_scores: maximum number of scores on a device at once, without a
      kernel. Queries of longer sequences attend in chunks, whose scores the
      backward pass computes again.
  """
  arrays = q_BTHW, k_BCKW, v_BCKW
  obstacle = functools.partial(_obstacle, q_BTHW, k_BCKW, mask, softcap)
  is_short = k_BCKW.shape[1] < SHORTEST
  choice = kernels.choose(implementation, obstacle, is_short)
  if choice.name == kernels.CUDNN:
    is_causal = isinstance(mask.order, Causal)
    return cudnn.attention(
      *arrays, mask.key_BC, scale=scale, is_causal=is_causal
    )
  settings = {'scale': scale, 'softcap': softcap}
  if choice.name == kernels.SPLASH:
    group = 0 if mask.segment_BC is None else mask.segment_BC.group
    segment_BC = jnp.where(mask.key_BC, group, splash.PADDING)
    return splash.attention(*arrays, segment_BC, **settings)
  return _in_chunks(*arrays, mask, max_live_scores, **settings)


def _obstacle(q_BTHW, k_BCKW, mask: Mask, softcap, kernel: str) -> str | None:
  """Why a kernel cannot compute a call; None if it can."""
  reason = _masked_otherwise(mask, kernel) or _uneven(q_BTHW, k_BCKW)
  if reason:
    return reason
  if mask.segment_BT is not None and kernel not in kernels.OF_PACKED_ROWS:
    return 'rows are packed'
  if kernel == kernels.SPLASH:
    return splash.obstacle(q_BTHW)
  is_causal = isinstance(mask.order, Causal)
  return cudnn.obstacle(q_BTHW, k_BCKW, softcap, is_causal=is_causal)


def _uneven(q_BTHW, k_BCKW) -> str | None:
  """Says what devices cannot share, as each computes its rows and heads."""
  (B, _, H, _), K = q_BTHW.shape, k_BCKW.shape[2]
  some = {
    'B': (B, 'rows'),
    'H': (H, 'query heads'),
    'K': (K, 'key-value heads'),
  }
  for letter, (size, name) in some.items():
    if not rules.is_even(letter, size):
      return f'devices cannot share {size} {name} evenly'
  return None


def _masked_otherwise(mask: Mask, kernel: str) -> str | None:
  """Says what a kernel does not know of a mask; None if it is as its own."""
  if isinstance(mask.order, Blocks):
    return 'queries attend to later keys of their block'
  if isinstance(mask.order, Bidirectional) and kernel == kernels.SPLASH:
    return 'queries attend to all keys'
  if mask.window is not None:
    return 'some layers have a sliding window, by positions without padding'
  if mask.segment_BT is not None and mask.segment_BT.row is not None:
    return 'completions in a packed row share a prompt'
  return None


def _in_chunks(
  q_BTHW, k_BCKW, v_BCKW, mask: Mask, max_live_scores: int, *, scale, softcap
):
  """Attention of as many queries at a time as `max_live_scores` allows."""
  B, T, H, W = q_BTHW.shape
  C = k_BCKW.shape[1]
  attend = functools.partial(_attend, scale=scale, softcap=softcap)
  on_device = (
    B // rules.devices_of('B', B) * (H // rules.devices_of('H', H)) * C
  )
  n = -(-T // max(1, max_live_scores // on_device))
  if n == 1:
    return attend(q_BTHW, k_BCKW, v_BCKW, mask.dense(T))
  t = -(-T // n)
  n = -(-T // t)

  def pad(x):
    return jnp.pad(x, [(0, 0), (0, n * t - T)] + [(0, 0)] * (x.ndim - 2))

  if mask.window is not None:
    mask = mask._replace(position_BT=pad(mask.position_BT))
  if mask.segment_BT is not None:
    mask = mask._replace(segment_BT=jax.tree.map(pad, mask.segment_BT))
  if isinstance(mask.order, Blocks):
    order = mask.order._replace(query_BT=pad(mask.order.query_BT))
    mask = mask._replace(order=order)
  dtype, wide = k_BCKW.dtype, mixed_precision.wide_dtype(k_BCKW.dtype)

  @jax.checkpoint
  def chunk(k_BCKW, v_BCKW, q_BtHW, start):
    mask_BtC = mask.dense(T, start, t)
    return attend(q_BtHW, k_BCKW.astype(dtype), v_BCKW.astype(dtype), mask_BtC)

  # Their gradients are sums over chunks.
  k_BCKW, v_BCKW = k_BCKW.astype(wide), v_BCKW.astype(wide)
  q_nBtHW = jnp.moveaxis(pad(q_BTHW).reshape(B, n, t, H, W), 1, 0)
  seen_nBtHW = jax.lax.map(
    lambda some: chunk(k_BCKW, v_BCKW, *some), (q_nBtHW, t * jnp.arange(n))
  )
  # [B, n t, H, W], of which the last rows are padding.
  seen = jnp.moveaxis(seen_nBtHW, 0, 1).reshape(B, n * t, H, W)
  return seen[:, :T]


@jax.named_scope(SCOPE)
def bidirectional(q_BTHW, k_BCKW, v_BCKW):
  """Attention of every query to every key, none of them padding, [B, T, H, W].

  Without a kernel, all scores are in memory at once.
  """
  (B, T), C = q_BTHW.shape[:2], k_BCKW.shape[1]
  mask = Mask(jnp.ones((B, C), bool), Bidirectional())
  obstacle = functools.partial(_obstacle, q_BTHW, k_BCKW, mask, None)
  choice = kernels.choose(kernels.AUTO, obstacle, C < SHORTEST)
  if choice.name == kernels.CUDNN:
    return cudnn.attention(q_BTHW, k_BCKW, v_BCKW, None, is_causal=False)
  if q_BTHW.dtype != jnp.float64:
    return jax.nn.dot_product_attention(q_BTHW, k_BCKW, v_BCKW)
  mask_BTC = jnp.ones((B, T, C), bool)
  return _attend(q_BTHW, k_BCKW, v_BCKW, mask_BTC, scale=None, softcap=None)


def _attend(q_BTHW, k_BCKW, v_BCKW, mask_BTC, *, scale, softcap):
  """Attention of some queries, where `mask_BTC` is true."""
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
