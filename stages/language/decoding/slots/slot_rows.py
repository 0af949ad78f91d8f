"""Rows in decode slots: how they enter, and how they leave when they end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from stages import base
from stages.language.decoding import kv_cache, prefill, stopping
from stages.language.decoding.slots import kept_rows, slot_cache
from stages.models import transformer


class Slots(NamedTuple):
  """Rows that are being decoded, one in each of M slots.

  Attributes:
    row_M: index of the row; B, the number of rows, where a slot is empty.
    is_open_M: whether the row goes on.
    ended_M: whether its latest token has ended it, rather than a limit.
    length_M: tokens that have been sampled of it.
    prompt_M: columns of its prompt: tokens but for the last.
    position_M: position of the last token of its prompt.
    token_M: latest token.
    caches: keys and values by layer, [M, K, C, W]. C is
      `slot_cache.columns(P + T)`.
    action_MT: sampled tokens.
    logp_MT: their log-probabilities.
    expert: experts of the tokens read, [M, T, L, k]; or None.
    text_M: states of the automaton of texts that end rows, see `stop_texts`;
      None without any.
  """

  row_M: Array
  is_open_M: Array
  ended_M: Array
  length_M: Array
  prompt_M: Array
  position_M: Array
  token_M: Array
  caches: tuple[kv_cache.LayerCache, ...]
  action_MT: Array
  logp_MT: Array
  expert: Array | None = None
  text_M: Array | None = None


class Queue(NamedTuple):
  """Rows in the order in which they enter slots.

  Attributes:
    row_B: indices of the rows; of these, the first `count` enter.
    count: number of rows that enter.
  """

  row_B: Array
  count: Array | int


class LoopState(NamedTuple):
  """State of the decoding loop.

  Attributes:
    next_row: place in the queue of the next row to enter a slot.
    slots: the rows that are being decoded.
    completions: the rows that have left their slots.
    expert: their experts, [B, T, L, k]; or None.
    known: what is known of when a call stops, if it ends before its rows do;
      else None.
    kept: keys and values that the call keeps for a later one; None for none.
  """

  next_row: Array
  slots: Slots
  completions: base.Completions
  expert: Array | None = None
  known: stopping.Stopping | None = None
  kept: kept_rows.Buffer | None = None


def empty(
  config: transformer.Config,
  layers,
  split: prefill.SplitPrompt,
  slots: int,
  completions: base.Completions,
) -> tuple[list, LoopState]:
  """Layers with prompts that were read; and empty slots, which all rows await.

  Args:
    config: the model.
    layers: as `prefill.prompt_layers` returns them.
    split: the prompts.
    slots: number of slots.
    completions: the rows so far.
  """
  rows, length = completions.mask.shape
  columns = slot_cache.columns(split.mask_NP.shape[1] + length)
  layers, caches = kv_cache.empty_after(layers, config, (slots, columns))

  def zeros(*shape, dtype=jnp.int32):
    return jnp.zeros((slots, *shape), dtype)

  return layers, LoopState(
    next_row=jnp.zeros((), jnp.int32),
    slots=Slots(
      row_M=jnp.full(slots, rows, jnp.int32),
      is_open_M=zeros(dtype=bool),
      ended_M=zeros(dtype=bool),
      length_M=zeros(),
      prompt_M=zeros(),
      position_M=zeros(),
      token_M=zeros(),
      caches=caches,
      action_MT=zeros(length),
      logp_MT=zeros(length, dtype=config.param_dtype),
    ),
    completions=completions,
  )


def shrink(state: LoopState, few: int) -> LoopState:
  """The same rows in `few` slots; at most `few` rows are unfinished."""
  order = jnp.argsort(~state.slots.is_open_M, stable=True)[:few]
  slots = jax.tree.map(lambda x: x[order], state.slots)
  return state._replace(slots=slots)


def is_stop(token, stop: tuple[int, ...]):
  return jnp.isin(token, jnp.array(stop, jnp.int32))


def put(x, t_M, new):
  """Writes token `t_M` of each row of `x`, [M, T, ...], in place."""
  return x.at[jnp.arange(len(t_M)), t_M].set(
    new.astype(x.dtype),
    indices_are_sorted=True,
    unique_indices=True,
    mode='promise_in_bounds',
  )


def _put_row(x, i, row):
  """Writes row `i`, in place."""
  return jax.lax.dynamic_update_slice_in_dim(
    x, row[None].astype(x.dtype), i, axis=0
  )


def replace_ended(
  layers,
  split: prefill.SplitPrompt,
  group_size: int,
  queue: Queue,
  state: LoopState,
) -> LoopState:
  """Writes rows that are done to the output, and fills their slots."""
  M = state.slots.row_M.shape[0]
  B = state.completions.mask.shape[0]

  def is_due(state: LoopState):
    now = state.slots
    return ~now.is_open_M & ((now.row_M < B) | (state.next_row < queue.count))

  def condition(carry):
    count, state = carry
    return (count < M) & is_due(state).any()

  def replace(carry):
    count, state = carry
    m = jnp.argmax(is_due(state))
    written = _write_row(state, m)
    slots = _enter(layers, split, group_size, queue, state, m)
    enters = (state.next_row < queue.count).astype(jnp.int32)
    completions, expert = written
    return count + 1, state._replace(
      next_row=state.next_row + enters,
      slots=slots,
      completions=completions,
      expert=expert,
    )

  if state.kept is not None:
    kept, slots = kept_rows.leave(state.kept, state.slots)
    state = state._replace(slots=slots, kept=kept)
  zero = jnp.zeros((), jnp.int32)
  return jax.lax.while_loop(condition, replace, (zero, state))[1]


def _write_row(state: LoopState, m) -> tuple[base.Completions, Array | None]:
  """The output, with the row of slot `m` written to it unless `m` is empty."""
  now, old = state.slots, state.completions
  B, T = old.mask.shape
  row, length = now.row_M[m], now.length_M[m]
  mask_T = jnp.arange(T) < length
  action_T = jnp.where(mask_T, now.action_MT[m], 0)
  logp_T = jnp.where(mask_T, now.logp_MT[m], 0)

  def put(x, new):
    # An empty slot has row B. The update clips it to B - 1, whose values must
    # not change.
    return _put_row(x, row, jnp.where(row < B, new.astype(x.dtype), x[row]))

  completions = base.Completions(
    put(old.action, action_T),
    put(old.logp, logp_T),
    put(old.mask, mask_T),
    put(old.alive, ~now.ended_M[m]),
  )
  if state.expert is None:
    return completions, None
  return completions, put(state.expert, now.expert[m])


def _enter(
  layers,
  split: prefill.SplitPrompt,
  group_size: int,
  queue: Queue,
  state: LoopState,
  m,
) -> Slots:
  """All slots, with the next row in slot `m`; empty if no row is waiting."""
  now, i, B = state.slots, state.next_row, queue.row_B.shape[0]
  row = queue.row_B[jnp.minimum(i, B - 1)]
  row = jnp.where(i < queue.count, row, B)
  n = jnp.minimum(row, B - 1) // group_size

  # Of an empty slot, one column is read.
  tokens = split.mask_NP[n].sum(dtype=jnp.int32) * (row < B)
  caches = tuple(
    slot_cache.enter(cache, kv_cache.LayerCache(*prompt), split.mask_NP, n, m)
    for cache, (_, *prompt) in zip(now.caches, layers, strict=True)
  )
  text_M = now.text_M
  if text_M is not None:
    text_M = _put_row(text_M, m, jnp.zeros((), text_M.dtype))
  return now._replace(
    row_M=_put_row(now.row_M, m, row),
    is_open_M=_put_row(now.is_open_M, m, row < B),
    ended_M=_put_row(now.ended_M, m, jnp.zeros((), bool)),
    length_M=_put_row(now.length_M, m, jnp.zeros((), jnp.int32)),
    prompt_M=_put_row(now.prompt_M, m, tokens),
    position_M=_put_row(now.position_M, m, split.position_B[n * group_size]),
    token_M=_put_row(now.token_M, m, split.token_B[n * group_size]),
    caches=caches,
    text_M=text_M,
  )
