"""Completions that an earlier call has left unfinished."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stages import base
from stages.language.decoding import kv_cache, prefill
from stages.language.decoding.slots import kept_rows, slot_cache, slot_rows

# Tokens of rows that are read at once. With more, more rows would be read that
# have ended, as rows are read in whole chunks.
MAX_TOKENS = 2**11


def _roll_rows(x, by_B):
  """Rolls `x[row, column, ...]` left, each row by its own number of columns."""
  return jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0))(x, by_B)


def roll(completions: base.Completions, by_B) -> base.Completions:
  """Rolls the columns of completions left, each row by its own number."""
  return completions._replace(
    action=_roll_rows(completions.action, by_B),
    logp=_roll_rows(completions.logp, by_B),
    mask=_roll_rows(completions.mask, by_B),
  )


def last_token(split: prefill.SplitPrompt, completions, length_B):
  """The next input of each row: its last token, or that of its prompt."""
  last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
  last_B1 = jnp.take_along_axis(completions.action, last_B1, axis=1)
  return jnp.where(length_B > 0, last_B1[:, 0], split.token_B)


def read(
  model,
  params,
  prompt: base.Prompt,
  group_size: int,
  completions: base.Completions,
):
  """Keys and values of unfinished completions under the current parameters.

  They are read again, as if the current parameters had sampled them, so that
  the trainer can recompute the log-probability of every later token.

  Returns:
    The next input token of each row, and its rolled cache by layer.
  """
  split = prefill.split_prompt(prompt, group_size)
  if split.pictures is not None:
    raise ValueError(
      'Completions that were left unfinished cannot be continued after prompts '
      'with pictures: finish them in the step that began them.'
    )
  P = split.prompt_NP.shape[1]
  cache, _ = _encoded(model, params, split, completions)
  length_B = completions.mask.sum(1, dtype=jnp.int32)

  def own(x_BCKW):
    return jnp.swapaxes(_roll_rows(x_BCKW[:, P:], length_B), 1, 2)

  caches = [
    kv_cache.LayerCache(own(cache.key[i]), own(cache.value[i]))
    for i in range(model.config.L)
  ]
  return last_token(split, completions, length_B), caches


def _encoded(model, params, split: prefill.SplitPrompt, completions):
  """Keys and values of prompts and tokens but the last, and where they are.

  Args:
    model: the model.
    params: its parameters.
    split: prompts, of one or more rows each.
    completions: tokens of the rows.
  """
  N, B = split.prompt_NP.shape[0], completions.mask.shape[0]
  token_BT = jnp.concatenate(
    [split.token_B[:, None], completions.action[:, :-1]], axis=1
  )

  def after_prompt(x_NP, x_BT):
    return jnp.concatenate([jnp.repeat(x_NP, B // N, axis=0), x_BT], axis=1)

  mask_BC = after_prompt(
    split.mask_NP, completions.mask.astype(split.mask_NP.dtype)
  )
  cache = model.apply(
    {'params': params},
    after_prompt(split.prompt_NP, token_BT),
    mask_BC,
    method='prefill',
  )
  return cache, mask_BC


def order_of_entry(
  is_open_B, num_started: int, kept: kept_rows.KeptRows | None
):
  """Indices of rows in the order in which they enter slots.

  Rows to read again come first, then those that are kept, then new ones.
  Finished rows are the last.

  Args:
    is_open_B: whether a row is unfinished.
    num_started: number of leading rows that may have tokens.
    kept: keys and values of these, where some are kept.
  """
  new_B = jnp.arange(is_open_B.shape[0]) >= num_started
  rank_B = jnp.where(is_open_B, 2 * new_B, 3)
  if kept is not None:
    rank_B = rank_B.at[:num_started].max(1 * kept.is_kept)
  return jnp.argsort(rank_B, stable=True)


def into_slots(
  model,
  params,
  layers: Sequence,
  split: prefill.SplitPrompt,
  completions: base.Completions,
  queue: slot_rows.Queue,
  state: slot_rows.LoopState,
  kept: kept_rows.KeptRows | None = None,
  *,
  count,
  most: int,
) -> slot_rows.LoopState:
  """The first rows of a queue in the first slots, with what they have read.

  As in `read`. Rows that have ended are not read again, nor are those that are
  kept, which follow the others.

  Args:
    model: the model.
    params: its parameters.
    layers: as `prefill.prompt_layers` returns them.
    split: the prompts.
    completions: the rows.
    queue: the rows that enter slots, as `order_of_entry` says.
    state: a loop whose slots are empty.
    kept: keys and values of the leading rows, where some are kept.
    count: rows that enter.
    most: as many at most, and no more than there are slots.
  """
  now, (B, T) = state.slots, completions.mask.shape
  M, (N, P) = now.row_M.shape[0], split.prompt_NP.shape
  enters_M = jnp.arange(M) < count
  row_M = queue.row_B[:M]
  length_B = completions.mask.sum(1, dtype=jnp.int32)
  tokens_N = split.mask_NP.sum(1, dtype=jnp.int32)
  at_once = min(most, max(1, MAX_TOKENS // (P + T)))

  def chunk(i, caches):
    # The last chunk may begin earlier, and read some rows twice.
    start = jnp.minimum(i * at_once, M - at_once)
    row_R = jax.lax.dynamic_slice_in_dim(row_M, start, at_once)
    group_R = row_R // (B // N)
    some = prefill.SplitPrompt(
      split.prompt_NP[group_R],
      split.mask_NP[group_R],
      split.token_B[row_R],
      split.position_B[row_R],
    )
    own = jax.tree.map(lambda x: x[row_R], completions)
    read, mask_RC = _encoded(model, params, some, own)
    by_layer = [
      kv_cache.LayerCache(*(jnp.swapaxes(x[i], 1, 2) for x in read))
      for i in range(model.config.L)
    ]

    def put(r, caches):
      return tuple(
        slot_cache.enter(cache, layer, mask_RC, r, start + r)
        for cache, layer in zip(caches, by_layer, strict=True)
      )

    return jax.lax.fori_loop(0, at_once, put, caches)

  unread = count
  if kept is not None:
    is_kept_M = kept.is_kept[jnp.minimum(row_M, most - 1)] & (row_M < most)
    unread = count - (is_kept_M & enters_M).sum(dtype=jnp.int32)
  caches = jax.lax.fori_loop(0, -(-unread // at_once), chunk, now.caches)
  if kept is not None:
    caches = jax.lax.fori_loop(
      unread,
      count,
      lambda m, x: kept_rows.enter(kept, layers, split, row_M[m], m, x),
      caches,
    )
  slots = now._replace(
    row_M=jnp.where(enters_M, row_M, B),
    is_open_M=enters_M,
    ended_M=jnp.zeros(M, bool),
    length_M=jnp.where(enters_M, length_B[row_M], 0),
    prompt_M=jnp.where(enters_M, tokens_N[row_M // (B // N)], 0),
    position_M=split.position_B[row_M],
    token_M=last_token(split, completions, length_B)[row_M],
    caches=caches,
    action_MT=completions.action[row_M],
    logp_MT=completions.logp[row_M],
  )
  return state._replace(slots=slots, next_row=jnp.int32(count))
