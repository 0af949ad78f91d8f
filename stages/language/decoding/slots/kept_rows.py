"""Keys and values of unfinished rows, kept from one call to the next.

With the same parameters, a later call that continues the rows need not read
their tokens again. Most rows of a call end in it, and only at the end of the
call is it known which do not. So a call keeps as many rows as it may leave
unfinished: of the rows that have left their slots, first those that have not
ended, then those with the most new tokens. The unfinished rows are among them:
one that has ended and is cut has more new tokens than all rows that stay ended,
see `stopping`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from stages.language.decoding import kv_cache, prefill, stopping
from stages.language.decoding.slots import slot_cache
from stages.models import transformer

# Its dimension letters say how a mesh divides the caches.
_NAME = 'cache_BKTW'
Layers = dict[str, tuple[kv_cache.LayerCache, ...]]


class KeptRows(NamedTuple):
  """Keys and values of unfinished rows.

  Column 0 belongs to the last token of the prompt, and column t to token t − 1
  of the completion. Keys and values of the prompt's other tokens are not kept,
  as each call reads the prompts.

  Attributes:
    layers: keys and values by layer, [B, K, T, W], in any order of rows;
      arbitrary beyond the tokens of a row.
    at: index of each row in `layers`; -1 where the row is not kept.
  """

  layers: Layers
  at: Int[Array, ' B']

  @property
  def is_kept(self) -> Bool[Array, ' B']:
    return self.at >= 0


class Buffer(NamedTuple):
  """Rows that a call keeps.

  Attributes:
    layers: keys and values as in `KeptRows`, with room for R rows.
    row_R: indices of the kept rows among the B rows of the device; B where
      there is no row.
    rank_R: number of new tokens of each kept row that has ended; T + 1 for a
      row that has not ended; 0 where there is no row.
    before_B: number of tokens of each row before the call.
  """

  layers: Layers
  row_R: Int[Array, ' R']
  rank_R: Int[Array, ' R']
  before_B: Int[Array, ' B']


def empty(config: transformer.Config, rows: int, length: int) -> KeptRows:
  """Room for `rows` completions of `length` tokens, with no row kept yet."""
  layers = {_NAME: kv_cache.empty(config, rows, length)}
  return KeptRows(layers, jnp.full(rows, -1, jnp.int32))


def buffer(kept: KeptRows, before_B) -> Buffer:
  """An empty buffer in the memory of rows that an earlier call has kept.

  Args:
    kept: the rows that the earlier call has kept on this device.
    before_B: number of tokens of each row before the call.
  """
  R = jax.tree.leaves(kept.layers)[0].shape[0]
  none_R = jnp.zeros(R, jnp.int32)
  return Buffer(kept.layers, none_R + before_B.shape[0], none_R, before_B)


def sent_home(order: stopping.Order, kept: KeptRows | None) -> stopping.Order:
  """The order that gives each device the rows that it has kept itself.

  Keys and values are never sent to another device. All devices get equally many
  of the leading rows. So of the rows of a device that has kept more, some go to
  other devices, which read them again.

  Args:
    order: the order of the call without kept rows.
    kept: what is kept of the leading rows of the call; None if nothing is.
  """
  if kept is None or order.devices == 1:
    return order
  at_NG = kept.at.reshape(-1, order.part)
  N = at_NG.shape[0]
  # All rows of a part were on the same device.
  home_N = jnp.where(at_NG.max(1) < 0, -1, at_NG.max(1) // _share(kept, order))
  is_same_NN = (home_N[:, None] == home_N[None]) & (home_N >= 0)[None]
  before_N = jnp.tril(is_same_NN, -1).sum(1)
  want_N = before_N * order.devices + home_N
  is_home_N = (home_N >= 0) & (want_N < N)
  is_taken_N = (
    jnp.zeros(N, bool)
    .at[jnp.where(is_home_N, want_N, N)]
    .set(True, mode='drop')
  )
  free_N = jnp.argsort(is_taken_N, stable=True)
  other_N = free_N[jnp.cumsum(~is_home_N) - 1]
  part_N = jnp.argsort(jnp.where(is_home_N, want_N, other_N))
  row_NG = part_N[:, None] * order.part + jnp.arange(order.part)[None]
  first = row_NG.ravel()
  return order._replace(first=first, back=jnp.argsort(first))


def _share(kept: KeptRows, order: stopping.Order) -> int:
  """Number of rows that each device has room to keep."""
  return -(-kept.at.shape[0] // order.devices)


def dealt(kept: KeptRows, order: stopping.Order) -> KeptRows:
  """Kept rows as `order` deals them, those of the first device first.

  In the result, `at` is the index of a row within the rows that its device has
  kept; -1 where it is not kept, or kept on another device.
  """
  if order.devices == 1:
    return kept
  R, share = kept.at.shape[0], _share(kept, order)
  each = order.on_each(R)
  more = [(0, each * order.devices - R)]
  at = order.dealt(jnp.pad(kept.at, more, constant_values=-1))
  is_here = (at >= 0) & (at // share == jnp.arange(len(at)) // each)

  def padded(x):
    more = share * order.devices - R
    return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) if more else x

  layers = jax.tree.map(padded, kept.layers)
  return KeptRows(layers, jnp.where(is_here, at % share, -1))


def leave(buffer: Buffer, slots):
  """Copies rows that are done to the buffer, in place of lower-ranked ones.

  Ranks are those of `Buffer.rank_R`.

  Args:
    buffer: the rows that are kept so far.
    slots: a `slot_rows.Slots`; rows that are done are still in their slots.

  Returns:
    The new buffer, and the slots with the same values.
  """
  before_B, row_M, T = buffer.before_B, slots.row_M, slots.action_MT.shape[1]
  B = before_B.shape[0]
  new_M = slots.length_M - before_B[jnp.minimum(row_M, B - 1)]
  has_ended_M = slots.ended_M | (slots.length_M >= T)
  highest = T + 1
  rank_M = jnp.where(has_ended_M, new_M, highest)
  rank_M = jnp.where(slots.is_open_M | (row_M == B), 0, rank_M)

  def has_higher(pair):
    buffer, rank_M = pair
    return rank_M.max() > buffer.rank_R.min()

  def replace(pair):
    (layers, row_R, rank_R, _), rank_M = pair
    m, r = jnp.argmax(rank_M), jnp.argmin(rank_R)

    def copy(x_RKTW, x_MKCW):
      _, K, _, W = x_MKCW.shape
      at = m, 0, slots.prompt_M[m].astype(m.dtype), 0
      own_1KTW = jax.lax.dynamic_slice(x_MKCW, at, (1, K, T, W))
      return jax.lax.dynamic_update_slice_in_dim(x_RKTW, own_1KTW, r, 0)

    layers = {_NAME: jax.tree.map(copy, layers[_NAME], slots.caches)}
    row = row_M[m].astype(row_R.dtype)
    rows = row_R.at[r].set(row), rank_R.at[r].set(rank_M[m])
    return Buffer(layers, *rows, before_B), rank_M.at[m].set(0)

  buffer, rank_M = jax.lax.while_loop(has_higher, replace, (buffer, rank_M))
  # No rank exceeds the highest, so this changes nothing. But it makes rows that
  # enter slots wait for the loop; else XLA would copy all caches before it
  # writes to them.
  is_open_M = slots.is_open_M | (rank_M > highest)
  return buffer, slots._replace(is_open_M=is_open_M)


def enter(
  kept: KeptRows,
  layers: Sequence,
  split: prefill.SplitPrompt,
  row,
  m,
  caches: tuple[kv_cache.LayerCache, ...],
) -> tuple[kv_cache.LayerCache, ...]:
  """The caches of slots, with a prompt and its kept row written to slot `m`.

  Args:
    kept: the rows that are kept.
    layers: by layer, its parameters and the keys and values of the prompts, as
      `prefill.prompt_layers` returns them.
    split: the prompts.
    row: index of the row, which must be kept.
    m: number of the slot.
    caches: the caches of all slots, by layer.
  """
  n = row // (split.token_B.shape[0] // split.mask_NP.shape[0])
  tokens = split.mask_NP[n].sum(dtype=m.dtype)

  def put(x_MKCW, kept_RKTW):
    own_1KTW = jax.lax.dynamic_slice_in_dim(kept_RKTW, kept.at[row], 1)
    return jax.lax.dynamic_update_slice(x_MKCW, own_1KTW, (m, 0, tokens, 0))

  def one(cache, layer, own):
    prompt = kv_cache.LayerCache(*layer[1:])
    cache = slot_cache.enter(cache, prompt, split.mask_NP, n, m)
    return jax.tree.map(put, cache, own)

  return tuple(map(one, caches, layers, kept.layers[_NAME]))


def found(buffer: Buffer, id_B) -> tuple[Layers, Array]:
  """The rows that a device has kept at the end of a call, and their numbers.

  Args:
    buffer: the rows that are kept.
    id_B: number of each row of the device among the rows of all devices.

  Returns:
    The keys and values by layer, and the number of each of their rows among the
    rows of all devices; -1 where there is no row.
  """
  B = id_B.shape[0]
  id_R = id_B[jnp.minimum(buffer.row_R, B - 1)]
  return buffer.layers, jnp.where(buffer.row_R < B, id_R, -1)


def take(layers: Layers, id_R, row_N) -> KeptRows:
  """Selects what is kept of some rows of a call; not all need be kept.

  Args:
    layers: keys and values by layer that all devices have kept, as `found`
      returns them.
    id_R: numbers of the rows in `layers`.
    row_N: numbers of the rows to take.
  """
  is_it_NR = row_N[:, None] == id_R[None]
  at_N = jnp.where(is_it_NR.any(1), jnp.argmax(is_it_NR, axis=1), -1)
  # Devices that cannot share the rows evenly have kept more rows than these.
  N = row_N.shape[0]
  at_N = jnp.where(at_N < N, at_N, -1).astype(jnp.int32)
  return KeptRows(jax.tree.map(lambda x: x[:N], layers), at_N)
