"""Continuous batching: waiting rows enter decode slots as others end.

A static batch decodes until its longest row has ended, and rows that ended
earlier are still computed. Here a fixed number of slots decodes in one compiled
loop. When a row ends, its tokens are written to the output and the next waiting
row takes its slot. This is the iteration-level scheduling of Orca (OSDI '22).

A slot holds the keys and values of its row's prompt and of its completion, in
columns that are filled from the first one on. So the columns that an iteration
writes differ by slot, and so do those that it has to read.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding import rules
from stages import base
from stages.language import sample
from stages.language.decoding import (
  decode_layer,
  prefill,
  routing_replay,
  stopping,
  unfinished,
)
from stages.language.decoding import generate as static
from stages.language.decoding import stop_texts as stop_texts_lib
from stages.language.decoding.slots import kept_rows, slot_cache, slot_rows
from stages.models import transformer
from stages.models.layers import rope

# When no row is waiting and at most 1 / SHRINK of the slots hold a row, the
# loop continues with 1 / SHRINK of the slots.
SHRINK = 4


def generate(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  *,
  slots: int,
  length: int,
  group_size: int = 1,
  **settings,
) -> base.Experience:
  """Continues each prompt by up to `length` tokens, some rows at a time.

  For any number of slots, the tokens are those of
  `stages.language.decoding.generate.generate`: token t of a row is drawn with
  `fold_in(key, t)`. On a mesh, each device that holds rows decodes its own
  rows, in slots of its own.

  Args:
    model: the model.
    params: its parameters.
    prompt: prompts; the rows of a group are adjacent and equal.
    key_B: one key a row.
    slots: number of rows that a device decodes at once.
    length: maximum tokens of a row.
    group_size: rows that share a prompt, which is read once for all of them.
    **settings: `stop`, `stop_texts`, `sampling`, `greedy` and `record`, as in
      `generate.resume`.
  """
  empty = static.empty_completions(model.config, prompt.token.shape[0], length)
  run = functools.partial(
    _generate, model, slots=slots, group_size=group_size, **settings
  )
  order = _order(prompt, group_size)
  completions, routing = _on_each_device(
    model, params, order, run, (prompt, key_B, empty)
  )
  return static.experience(prompt, completions, routing)


def resume(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  completions: base.Completions,
  *,
  slots: int,
  group_size: int = 1,
  num_started: int = 0,
  should_continue: Callable[[Array], Array] = jnp.any,
  kept: kept_rows.KeptRows | None = None,
  **settings,
) -> base.Completions | tuple[base.Completions, Callable]:
  """Continues completions until all rows have ended, or enough of them.

  For any number of slots and on any mesh, the tokens are those of
  `stages.language.decoding.generate.resume`, see `stopping`.

  Args:
    model: the model.
    params: its parameters.
    prompt: prompts; the rows of a group are adjacent and equal.
    key_B: one key a row.
    completions: tokens so far, with room for the rest.
    slots: number of rows that a device decodes at once; more, if more than that
      are continued, as these enter slots together.
    group_size: rows that share a prompt, which is read once for all of them.
    num_started: number of leading rows that may already have tokens.
    should_continue: as in `generate.resume`. It must be false for a part of
      the rows for which it is false.
    kept: keys and values of the leading rows, where an earlier call with the
      same parameters kept some. None to read all tokens again.
    **settings: `stop`, `stop_texts`, `sampling` and `greedy`, as in
      `generate.resume`.

  Returns:
    The completions; with `kept`, also `row_N -> KeptRows`, those of any rows
    that are unfinished now.
  """
  order = kept_rows.sent_home(_order(prompt, group_size), kept)
  run = functools.partial(
    _resume,
    model,
    stopping.Rule(should_continue, order, completions.mask.shape[1]),
    slots=slots,
    num_started=order.on_each(num_started),
    group_size=group_size,
    **settings,
  )
  given = order.dealt((prompt, key_B, completions))
  if kept is None:
    return order.restored(_on_each_device(model, params, order, run, given))
  id_B = order.dealt(jnp.arange(key_B.shape[0]))
  given = *given, kept_rows.dealt(kept, order), id_B
  end, *keeps = _on_each_device(model, params, order, run, given)
  return order.restored(end), functools.partial(kept_rows.take, *keeps)


def _order(prompt: base.Prompt, group_size: int) -> stopping.Order:
  devices = rules.devices_of('B', prompt.token.shape[0] // group_size)
  return stopping.Order(rules.ambient_axes('B'), devices, group_size)


def _on_each_device(model, params, order: stopping.Order, run, rows: tuple):
  """Returns `run(params, *rows)`, by each device for its own rows."""
  in_place = transformer.are_ready(model.config, params)
  run = functools.partial(run, in_place=in_place)
  params = rules.gather(transformer.compute_params(model.config, params))
  if order.devices > 1:
    by_row = PartitionSpec(order.axes)
    # Each device stops after its own number of iterations. Without shard_map,
    # XLA would make all devices run the same number.
    run = jax.shard_map(
      run,
      in_specs=(PartitionSpec(), *(by_row for _ in rows)),
      out_specs=by_row,
      axis_names={*order.axes},
      check_vma=False,
    )
  return run(params, *rows)


class Loop(NamedTuple):
  """The arguments of a loop that do not change in it, on one device.

  Attributes:
    model: the model.
    params: its parameters.
    split: the prompts.
    key_B: one key a row.
    queue: the rows that enter slots.
    group_size: rows that share a prompt.
    length_B: tokens that rows had before the call.
    rule: when a call stops that ends before its rows do; else None.
  """

  model: transformer.Transformer
  params: base.Params
  split: prefill.SplitPrompt
  key_B: base.Key
  queue: slot_rows.Queue
  group_size: int
  length_B: Array
  rule: stopping.Rule | None = None


def _generate(
  model,
  params,
  prompt: base.Prompt,
  key_B,
  empty: base.Completions,
  *,
  slots: int,
  group_size: int,
  in_place: bool,
  record: bool = False,
  **settings,
) -> tuple[base.Completions, routing_replay.Routing | None]:
  """Decodes all rows of one device, and records their experts if asked to."""
  split = prefill.split_prompt(prompt, group_size)
  layers, of_prompt = prefill.prompt_layers(
    model, params, split, record, in_place
  )
  B, T = empty.mask.shape
  slots = min(slots, B)
  layers, state = slot_rows.empty(model.config, layers, split, slots, empty)
  if record:
    room = functools.partial(routing_replay.empty, model.config)
    now = state.slots._replace(expert=room(slots, T))
    state = state._replace(slots=now, expert=room(B, T))
  queue = slot_rows.Queue(jnp.arange(B), B)
  zero_B = jnp.zeros(B, jnp.int32)
  loop = Loop(model, params, split, key_B, queue, group_size, zero_B)
  end = _decode_all(loop, layers, state, **settings)
  routing = routing_replay.joined(of_prompt, end.expert, group_size)
  return end.completions, routing


def _resume(
  model,
  rule: stopping.Rule,
  params,
  prompt: base.Prompt,
  key_B,
  completions: base.Completions,
  kept: kept_rows.KeptRows | None = None,
  id_B=None,
  *,
  slots: int,
  num_started: int,
  group_size: int,
  in_place: bool,
  **settings,
) -> base.Completions | tuple[base.Completions, kept_rows.Layers, Array]:
  """Continues the rows of one device.

  With kept rows and the numbers of all rows, it also returns keys and values of
  those that it keeps, and their numbers; -1 where it keeps none.
  """
  split = prefill.split_prompt(prompt, group_size)
  layers, _ = prefill.prompt_layers(model, params, split, False, in_place)
  B, T = completions.mask.shape
  length_B = completions.mask.sum(1, dtype=jnp.int32)
  is_open_B = completions.alive & (length_B < T)
  known = rule.begin(jnp.where(is_open_B, T - length_B, 0))
  queue = slot_rows.Queue(
    unfinished.order_of_entry(is_open_B, num_started, kept),
    jnp.where(known.limit > 0, is_open_B.sum(), 0),
  )
  slots = min(max(slots, num_started), B)
  layers, state = slot_rows.empty(
    model.config, layers, split, slots, completions
  )
  room = None if kept is None else kept_rows.buffer(kept, length_B)
  state = state._replace(known=known, kept=room)
  loop = Loop(model, params, split, key_B, queue, group_size, length_B, rule)
  if num_started:
    count = jnp.minimum(is_open_B[:num_started].sum(), queue.count)
    state = unfinished.into_slots(
      model,
      params,
      layers,
      split,
      completions,
      queue,
      state,
      kept,
      count=count,
      most=num_started,
    )
  end = _decode_all(loop, layers, state, **settings)
  cut = stopping.cut(end.completions, length_B, end.known.limit)
  return cut if kept is None else (cut, *kept_rows.found(end.kept, id_B))


def _decode_all(
  loop: Loop,
  layers,
  state: slot_rows.LoopState,
  *,
  stop: tuple[int, ...] = (),
  stop_texts: stop_texts_lib.StopTexts | None = None,
  sampling: sample.Sampling = sample.Sampling(),
  greedy: bool = False,
) -> slot_rows.LoopState:
  """Decodes until all rows of the queue are done."""
  B, T = state.completions.mask.shape
  slots = state.slots.row_M.shape[0]

  def replace(state):
    state = slot_rows.replace_ended(
      layers, loop.split, loop.group_size, loop.queue, state
    )
    if loop.rule is None:
      return state
    busy = loop.rule.order.largest(state.slots.is_open_M.sum(dtype=jnp.int32))
    return state._replace(known=state.known._replace(busy=busy))

  def extend(state: slot_rows.LoopState) -> slot_rows.LoopState:
    now = state.slots
    logit_M1V, now = _decode(loop.model, loop.params, layers, now)
    row_M = jnp.minimum(now.row_M, B - 1)
    token_M, logit_M1V = sample.next_token(
      logit_M1V, loop.key_B[row_M], now.length_M, sampling, greedy
    )
    logp_M = sample.logp(logit_M1V, token_M[:, None])[:, 0]
    ended_M, text_M = slot_rows.is_stop(token_M, stop), None
    if stop_texts:
      text_M = stop_texts.advance(now.text_M, token_M)
      ended_M |= stop_texts.has_ended(text_M)
    is_full_M = now.length_M + 1 >= T
    ends_M = now.is_open_M & (is_full_M | ended_M)
    is_open_M, known = now.is_open_M & ~ends_M, state.known
    if loop.rule is not None:
      new_M = now.length_M + 1 - loop.length_B[row_M]
      known = loop.rule.after_ends(known, now.row_M, ends_M, new_M)
      is_open_M &= new_M < known.limit
    now = now._replace(
      is_open_M=is_open_M,
      ended_M=jnp.where(now.is_open_M, ended_M, now.ended_M),
      # An empty slot stays empty.
      length_M=now.length_M + now.is_open_M,
      token_M=token_M,
      action_MT=slot_rows.put(now.action_MT, now.length_M, token_M),
      logp_MT=slot_rows.put(now.logp_MT, now.length_M, logp_M),
      text_M=text_M,
    )
    return replace(state._replace(slots=now, known=known))

  def open_slots(state):
    # Devices that wait for each other make the same number of iterations.
    known = state.known
    return state.slots.is_open_M.sum() if known is None else known.busy

  def run(state, at_least: int) -> slot_rows.LoopState:
    # While rows are waiting, all slots hold an unfinished row, so the loop
    # cannot end below `at_least` before the last row has entered.
    return jax.lax.while_loop(
      lambda state: open_slots(state) >= at_least, extend, state
    )

  if stop_texts:
    # Rows that enter later have no tokens.
    begun_M = stop_texts.begin(state.completions)[
      jnp.minimum(state.slots.row_M, B - 1)
    ]
    state = state._replace(slots=state.slots._replace(text_M=begun_M))
  state = replace(state)
  few = slots // SHRINK
  if few:
    # The last rows continue in a loop of fewer slots.
    state = slot_rows.shrink(run(state, few + 1), few)
  return run(state, 1)


def _decode(model, params, layers, now: slot_rows.Slots):
  """Logits [M, 1, V] of the next token, and slots with the current one."""
  c = model.config
  variables = {'params': params}
  contexts = _contexts(c, now)
  x_M1D = model.apply(variables, now.token_M[:, None], method='embed')
  caches, record = [], None if now.expert is None else []
  for i, ((own, _, _), cache) in enumerate(
    zip(layers, now.caches, strict=True)
  ):
    own = transformer.layer(own)
    (cos_M1R, sin_M1R), span, kernel = contexts[c.is_local(i)]
    qkv = decode_layer.project(c, own, x_M1D, cos_M1R, sin_M1R)
    cache, seen_M1HW = slot_cache.extend(c, kernel, cache, *qkv, span)
    x_M1D = decode_layer.finish(c, own, x_M1D, seen_M1HW, record)
    caches.append(cache)
  if record is not None:
    expert = jnp.stack([x[:, 0] for x in record], axis=1)
    now = now._replace(expert=slot_rows.put(now.expert, now.length_M, expert))
  now = now._replace(caches=tuple(caches))
  return model.apply(variables, x_M1D, method='logits'), now


def _contexts(c: transformer.Config, now: slot_rows.Slots):
  """Angles, columns and what reads them, by whether layers have a window."""
  C = now.caches[0].key.shape[2]
  position_M1 = (now.position_M + now.length_M)[:, None]
  size_M = now.prompt_M + now.length_M

  def context(settings, window: int | None):
    return (
      rope.angles(settings, c.W, position_M1),
      slot_cache.span(size_M, now.is_open_M, window),
      slot_cache.choose_kernel(c, C, window is not None).name,
    )

  contexts = {False: context(c.rope, None)}
  if c.window is not None:
    contexts[True] = context(c.local_rope or c.rope, c.window)
  return contexts
