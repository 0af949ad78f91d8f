"""Autoregressive generation, one token a step until every row has ended."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sharding import rules
from stages import base, core
from stages.language import sample
from stages.language.decoding import (
  decode_layer,
  kept_cache,
  kv_cache,
  parts,
  prefill,
  routing_replay,
  unfinished,
)
from stages.language.decoding import stop_texts as stop_texts_lib
from stages.language.decoding.slots import slot_rows
from stages.models import transformer
from stages.models.layers import attention, rope


class DecodeState(NamedTuple):
  """State of the decoding loop.

  Every iteration writes one column, the same for all rows. A row that starts
  with n tokens is therefore rolled left by n columns: its old tokens lie at the
  right end, and its new ones follow from column 0.

  Attributes:
    t: tokens decoded so far in every row.
    token_B: the latest token.
    caches: keys and values of the completions, by layer.
    completions: the completions, rolled.
    expert: experts of the tokens read, as in `routing_replay.Routing`; None to
      record none.
    text_B: states of the automaton of texts that end rows, see `stop_texts`;
      None without any.
  """

  t: Array
  token_B: Array
  caches: tuple[kv_cache.LayerCache, ...]
  completions: base.Completions
  expert: Array | None = None
  text_B: Array | None = None


def empty_completions(
  config: transformer.Config, rows: int, length: int
) -> base.Completions:
  """Completions [rows, length] without tokens."""
  return base.Completions(
    action=jnp.zeros((rows, length), jnp.int32),
    logp=jnp.zeros((rows, length), config.param_dtype),
    mask=jnp.zeros((rows, length), jnp.float32),
    alive=jnp.ones(rows, bool),
  )


def decode_states(
  model,
  params,
  layers,
  split: prefill.SplitPrompt,
  length_B,
  state: DecodeState,
  *,
  keep: bool = False,
  earlier: Sequence[Sequence[kv_cache.LayerCache]] = (),
):
  """Final hidden states, and the state with the current token in its caches.

  Args:
    model: the model.
    params: its parameters.
    layers: for each layer, its parameters and its prompts' keys and values,
      laid out [N, K, P, W].
    split: the prompts.
    length_B: tokens that each row had when the loop started.
    state: the state of the loop.
    keep: whether the columns of finished rows stay as they are, for a later
      call that continues them.
    earlier: caches, by layer, of each part of the columns before those of the
      state's caches.
  """
  c, t = model.config, state.t
  variables = {'params': params}
  position_B1 = (split.position_B + length_B + t)[:, None]
  T = state.completions.mask.shape[1]
  start = sum(part[0].key.shape[2] for part in earlier)
  column_1S = jnp.arange(start + state.caches[0].key.shape[2])[None]
  past_BS = (column_1S <= t) | (column_1S >= T - length_B[:, None])
  # By whether a layer has a window: angles, and tokens that it reaches.
  context = {False: (*rope.angles(c.rope, c.W, position_B1), None)}
  if c.window is not None:
    S = column_1S.shape[1]
    near_BC = _near(c, split, position_B1[:, 0], length_B, t, S)
    angles = rope.angles(c.local_rope or c.rope, c.W, position_B1)
    context[True] = (*angles, near_BC)
  x_B1D = model.apply(variables, state.token_B[:, None], method='embed')
  open_B = _open_rows(state, length_B) if keep else None
  caches, record = [], None if state.expert is None else []
  for i, ((own, key_NKPW, value_NKPW), cache) in enumerate(
    zip(layers, state.caches, strict=True)
  ):
    own = transformer.layer(own)
    cos_B1R, sin_B1R, near_BC = context[c.is_local(i)]
    q_B1HW, k_B1KW, v_B1KW = decode_layer.project(
      c, own, x_B1D, cos_B1R, sin_B1R
    )
    cache = kv_cache.update(cache, t - start, k_B1KW, v_B1KW, open_B)
    # The planner counts a kernel in its place, where slots have one.
    with jax.named_scope(core.ATTENTION_SCOPE):
      seen_B1HW = kv_cache.attention(
        c,
        q_B1HW,
        cache,
        key_NKPW,
        value_NKPW,
        split.mask_NP,
        past_BS,
        near_BC,
        [part[i] for part in earlier],
      )
    x_B1D = decode_layer.finish(c, own, x_B1D, seen_B1HW, record)
    caches.append(cache)
  expert = routing_replay.put(state.expert, t, record)
  return x_B1D, state._replace(caches=tuple(caches), expert=expert)


def _near(
  c: transformer.Config, split: prefill.SplitPrompt, position_B, length_B, t, T
):
  """Mask [B, P + T] of the prompt's and the cached tokens in the window."""
  group_size = position_B.shape[0] // split.mask_NP.shape[0]
  column_1T = jnp.arange(T)[None]
  length_B1 = length_B[:, None]
  # Old tokens lie at the right end, see `DecodeState`.
  order_BT = jnp.where(
    column_1T <= t, length_B1 + column_1T, length_B1 + column_1T - T
  )
  prompt_NP = transformer.positions(split.mask_NP)
  position_BC = jnp.concatenate(
    [
      jnp.repeat(prompt_NP, group_size, axis=0),
      split.position_B[:, None] + order_BT,
    ],
    axis=1,
  )
  return attention.within_window(position_B[:, None], position_BC, c.window)[
    :, 0
  ]


def generate(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  *,
  length: int,
  record: bool = False,
  **kwargs,
) -> base.Experience:
  """Continues each prompt by up to `length` tokens: `resume` from no tokens.

  Returns:
    The sampled tokens with their log-probabilities; with `record`, also the
    experts of the tokens that were read.
  """
  empty = empty_completions(model.config, prompt.token.shape[0], length)
  found = resume(model, params, prompt, key_B, empty, **kwargs, record=record)
  completions, routing = found if record else (found, None)
  return experience(prompt, completions, routing)


def experience(
  prompt: base.Prompt, completions: base.Completions, routing
) -> base.Experience:
  """The experience of completions of which none goes on."""
  action, logp, mask, alive = completions
  truncated = alive.astype(jnp.float32)
  return base.Experience(prompt, action, logp, mask, truncated, routing=routing)


def resume(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  completions: base.Completions,
  *,
  stop: tuple[int, ...] = (),
  stop_texts: stop_texts_lib.StopTexts | None = None,
  sampling: sample.Sampling = sample.Sampling(),
  group_size: int = 1,
  greedy: bool = False,
  num_started: int = 0,
  should_continue: Callable[[Array], Array] = jnp.any,
  cache: kept_cache.KeptCache | None = None,
  max_unread: int = 0,
  record: bool = False,
) -> base.Completions | tuple[base.Completions, Any]:
  """Continues completions until all rows have ended, or enough of them.

  Token t of a row is drawn with `fold_in(key, t)`: it depends on the key of the
  row alone, and not on where generation was interrupted. A row ends with a
  token of `stop`, with one in which one of `stop_texts` ends, or when it is
  full.

  Args:
    model: the model.
    params: its parameters.
    prompt: prompts; the rows of a group are adjacent and equal.
    key_B: one key a row.
    completions: tokens so far, with room for the rest.
    stop: ids of tokens that end a row; the row keeps that token.
    stop_texts: texts that end a row, likewise; None for none. Where a row has
      tokens, a text may have begun in them.
    sampling: the distribution to draw from.
    group_size: rows that share a prompt, which is read once for all of them.
    greedy: take the most likely token instead.
    num_started: number of leading rows that may already have tokens.
    should_continue: `open_B -> bool`: whether to sample one more token of each
      unfinished row, given which rows are unfinished. By default, until all
      rows have ended.
    cache: keys and values of the tokens that earlier calls have read or
      sampled, with the same parameters. None to read all tokens again.
    max_unread: most tokens of a row that are not in the cache, but for the last
      token.
    record: whether to record experts, of rows that have no tokens yet.

  Returns:
    The completions; with a cache, also what it is then, and with `record`, the
    `routing_replay.Routing`.
  """
  in_place = transformer.are_ready(model.config, params)
  params = rules.gather(transformer.compute_params(model.config, params))
  split = prefill.split_prompt(prompt, group_size)
  read, of_prompt = prefill.read(model, params, split.read, record)
  layers = prefill.cached_layers(model, params, read, in_place)
  T = completions.mask.shape[1]
  length_B = completions.mask.sum(1, dtype=jnp.int32)
  later = []
  if cache is None:
    # Tokens of earlier calls are read into one part, as rows end anywhere.
    columns = (T,) if num_started else parts.part_columns(T)
    sizes = [(key_B.shape[0], some) for some in columns]
    layers, caches, *later = kv_cache.empty_after(layers, model.config, *sizes)
    start = _initial_state(
      model, params, prompt, group_size, completions, caches, num_started
    )
  else:
    cache = kept_cache.read(
      model, params, layers, split, completions, cache, max_unread
    )
    start = _kept_state(split, completions, kept_cache.roll(cache, length_B))

  def extend(earlier, state: DecodeState) -> DecodeState:
    open_B = _open_rows(state, length_B)
    x_B1D, state = decode_states(
      model,
      params,
      layers,
      split,
      length_B,
      state,
      keep=cache is not None,
      earlier=earlier,
    )
    logit_B1V = model.apply({'params': params}, x_B1D, method='logits')
    token_B, logit_B1V = sample.next_token(
      logit_B1V, key_B, length_B + state.t, sampling, greedy
    )
    token_B = jnp.where(open_B, token_B, 0)
    logp_B = sample.logp(logit_B1V, token_B[:, None])[:, 0]
    ends_B, text_B = slot_rows.is_stop(token_B, stop), None
    if stop_texts:
      text_B = stop_texts.advance(state.text_B, token_B)
      ends_B |= stop_texts.has_ended(text_B)
    return state._replace(
      t=state.t + 1,
      token_B=token_B,
      completions=append(state, open_B, token_B, logp_B, ends_B),
      text_B=text_B,
    )

  if stop_texts:
    start = start._replace(text_B=stop_texts.begin(completions))
  if record:
    expert = routing_replay.empty(model.config, *completions.mask.shape)
    start = start._replace(expert=expert)

  def may_continue(state: DecodeState):
    return should_continue(_open_rows(state, length_B))

  end = parts.decode(extend, may_continue, start, later)
  if record:
    routing = routing_replay.joined(of_prompt, end.expert, group_size)
    return end.completions, routing
  if cache is not None:
    return _to_keep(end, length_B)
  if num_started:
    return unfinished.roll(end.completions, -length_B)
  return end.completions


def _to_keep(
  end: DecodeState, length_B
) -> tuple[base.Completions, kept_cache.KeptCache]:
  """Completions and cache of a finished loop, rolled back."""
  completions = unfinished.roll(end.completions, -length_B)
  now_B = completions.mask.sum(1, dtype=jnp.int32)
  cache = kept_cache.KeptCache(end.caches, now_B)
  return completions, cache._replace(layers=kept_cache.roll(cache, -length_B))


def _initial_state(
  model,
  params,
  prompt,
  group_size: int,
  completions,
  caches,
  num_started: int,
) -> DecodeState:
  """The state of the decoding loop before its first token."""
  token_B = prefill.split_prompt(prompt, group_size).token_B
  if num_started:
    first = jax.tree.map(lambda x: x[:num_started], (prompt, completions))
    started = unfinished.read(model, params, first[0], group_size, first[1])
    token_B, caches = jax.tree.map(
      lambda all_, some: all_.at[:num_started].set(some),
      (token_B, [*caches]),
      started,
    )
    length_B = completions.mask.sum(1, dtype=jnp.int32)
    completions = unfinished.roll(completions, length_B)
  return DecodeState(
    jnp.zeros((), jnp.int32), token_B, tuple(caches), completions
  )


def _open_rows(state: DecodeState, length_B):
  """Rows that get another token; they began with `length_B` tokens."""
  T = state.completions.mask.shape[1]
  return state.completions.alive & (length_B + state.t < T)


def _kept_state(
  split: prefill.SplitPrompt, completions: base.Completions, caches
) -> DecodeState:
  """As `_initial_state`, with a rolled cache of all tokens but the last."""
  length_B = completions.mask.sum(1, dtype=jnp.int32)
  return DecodeState(
    jnp.zeros((), jnp.int32),
    unfinished.last_token(split, completions, length_B),
    caches,
    unfinished.roll(completions, length_B),
  )


def append(state: DecodeState, open_B, token_B, logp_B, ends_B):
  """Completions with one more token in the rows that are unfinished.

  Args:
    state: the state before.
    open_B: those rows.
    token_B: the token of each.
    logp_B: its log-probability.
    ends_B: whether it ends its row.
  """
  t, old = state.t, state.completions

  def put(x_BT, x_B):
    # In a finished row, column t may hold an old token of that row.
    old_B1 = jax.lax.dynamic_slice_in_dim(x_BT, t, 1, 1)
    x_B = jnp.where(open_B, x_B.astype(x_BT.dtype), old_B1[:, 0])
    return jax.lax.dynamic_update_slice_in_dim(x_BT, x_B[:, None], t, 1)

  return base.Completions(
    put(old.action, token_B),
    put(old.logp, logp_B),
    put(old.mask, open_B),
    old.alive & ~(open_B & ends_B),
  )
