"""Continuous batching: waiting rows enter decode slots as others end.

A static batch decodes until its longest row has ended, and rows that ended
earlier are still computed. Here a fixed number of slots decodes in one compiled
loop. When a row ends, its tokens are written to the output and the next waiting
row takes its slot. This is the iteration-level scheduling of Orca (OSDI '22).

A slot holds the keys and values of its row's prompt and of its completion, in
columns that are filled from the first one on. So the columns that an iteration
writes differ by slot, and so do those that it has to read.
"""

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
  kv_cache,
  prefill,
  routing_replay,
  slot_cache,
)
from stages.language.decoding import generate as static
from stages.models import transformer
from stages.models.layers import rope

# When no row is waiting and at most 1 / SHRINK of the slots hold a row, the
# loop continues with 1 / SHRINK of the slots.
SHRINK = 4


class Slots(NamedTuple):
  """Rows that are being decoded, one in each of M slots.

  Attributes:
    row_M: index of the row; B, the number of rows, where a slot is empty.
    is_open_M: whether the row has not ended.
    length_M: tokens that have been sampled of it.
    prompt_M: columns of its prompt: tokens but for the last.
    position_M: position of the last token of its prompt.
    token_M: latest token.
    caches: keys and values by layer, [M, K, C, W]. C is
      `slot_cache.columns(P + T)`.
    action_MT: sampled tokens.
    logp_MT: their log-probabilities.
    expert: experts of the tokens read, [M, T, L, k]; or None.
  """

  row_M: Array
  is_open_M: Array
  length_M: Array
  prompt_M: Array
  position_M: Array
  token_M: Array
  caches: tuple[kv_cache.LayerCache, ...]
  action_MT: Array
  logp_MT: Array
  expert: Array | None = None


class LoopState(NamedTuple):
  """State of the decoding loop.

  Attributes:
    next_row: index of the next row to enter a slot.
    slots: the rows that are being decoded.
    completions: the rows that have ended.
    expert: their experts, [B, T, L, k]; or None.
  """

  next_row: Array
  slots: Slots
  completions: base.Completions
  expert: Array | None = None


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
    **settings: `stop`, `sampling`, `greedy` and `record`, as in
      `generate.resume`.
  """
  params = rules.gather(transformer.compute_params(model.config, params))
  run = functools.partial(
    _generate,
    model,
    slots=slots,
    length=length,
    group_size=group_size,
    **settings,
  )
  B = prompt.token.shape[0]
  if rules.devices_of('B', B // group_size) > 1:
    axes = rules.mesh_axes(jax.sharding.get_abstract_mesh(), 'B')
    by_row = PartitionSpec(axes)
    # Each device stops after its own number of iterations. Without shard_map,
    # XLA would make all devices run the same number.
    run = jax.shard_map(
      run,
      in_specs=(PartitionSpec(), by_row, by_row),
      out_specs=by_row,
      axis_names={*axes},
      check_vma=False,
    )
  completions, routing = run(params, prompt, key_B)
  return static.experience(prompt, completions, routing)


def _generate(
  model,
  params,
  prompt: base.Prompt,
  key_B,
  *,
  slots: int,
  length: int,
  group_size: int,
  stop: tuple[int, ...] = (),
  sampling: sample.Sampling = sample.Sampling(),
  greedy: bool = False,
  record: bool = False,
) -> tuple[base.Completions, routing_replay.Routing | None]:
  """Decodes all rows of one device, and records their experts if asked to."""
  split = prefill.split_prompt(prompt, group_size)
  layers, of_prompt = prefill.prompt_layers(model, params, split, record)
  B = key_B.shape[0]
  slots = min(slots, B)
  layers, state = _initial_state(model.config, layers, split, slots, B, length)
  replace = functools.partial(_replace_ended, layers, split, group_size, stop)

  def extend(state: LoopState) -> LoopState:
    now = state.slots
    logit_M1V, now = _decode(model, params, layers, now)
    key_M = key_B[jnp.minimum(now.row_M, B - 1)]
    token_M, logit_M1V = sample.next_token(
      logit_M1V, key_M, now.length_M, sampling, greedy
    )
    logp_M = sample.logp(logit_M1V, token_M[:, None])[:, 0]
    is_full_M = now.length_M + 1 >= length
    now = now._replace(
      is_open_M=now.is_open_M & ~is_full_M & ~_is_stop(token_M, stop),
      # An empty slot stays empty.
      length_M=now.length_M + now.is_open_M,
      token_M=token_M,
      action_MT=_put(now.action_MT, now.length_M, token_M),
      logp_MT=_put(now.logp_MT, now.length_M, logp_M),
    )
    return replace(state._replace(slots=now))

  def run(state: LoopState, at_least: int) -> LoopState:
    # While rows are waiting, all slots hold an unfinished row, so the loop
    # cannot end below `at_least` before the last row has entered.
    return jax.lax.while_loop(
      lambda state: state.slots.is_open_M.sum() >= at_least, extend, state
    )

  if record:
    room = functools.partial(routing_replay.empty, model.config)
    now = state.slots._replace(expert=room(slots, length))
    state = state._replace(slots=now, expert=room(B, length))
  state = replace(state)
  few = slots // SHRINK
  if few:
    # The last rows continue in a loop of fewer slots.
    state = _shrink(run(state, few + 1), few)
  end = run(state, 1)
  routing = routing_replay.joined(of_prompt, end.expert, group_size)
  return end.completions, routing


def _initial_state(
  config: transformer.Config,
  layers,
  split: prefill.SplitPrompt,
  slots: int,
  rows: int,
  length: int,
) -> tuple[list, LoopState]:
  """Layers with prompts that were read; empty slots, and all rows waiting."""
  columns = slot_cache.columns(split.mask_NP.shape[1] + length)
  layers, caches = kv_cache.empty_after(layers, config, (slots, columns))

  def zeros(*shape, dtype=jnp.int32):
    return jnp.zeros((slots, *shape), dtype)

  return layers, LoopState(
    next_row=jnp.zeros((), jnp.int32),
    slots=Slots(
      row_M=jnp.full(slots, rows, jnp.int32),
      is_open_M=zeros(dtype=bool),
      length_M=zeros(),
      prompt_M=zeros(),
      position_M=zeros(),
      token_M=zeros(),
      caches=caches,
      action_MT=zeros(length),
      logp_MT=zeros(length, dtype=config.param_dtype),
    ),
    completions=static.empty_completions(config, rows, length),
  )


def _shrink(state: LoopState, few: int) -> LoopState:
  """The same rows in `few` slots; at most `few` rows are unfinished."""
  order = jnp.argsort(~state.slots.is_open_M, stable=True)[:few]
  slots = jax.tree.map(lambda x: x[order], state.slots)
  return state._replace(slots=slots)


def _is_stop(token, stop: tuple[int, ...]):
  return jnp.isin(token, jnp.array(stop, jnp.int32))


def _put(x, t_M, new):
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


def _replace_ended(
  layers, split: prefill.SplitPrompt, group_size: int, stop, state: LoopState
) -> LoopState:
  """Writes rows that have ended to the output, and fills their slots."""
  M = state.slots.row_M.shape[0]
  B = state.completions.mask.shape[0]

  def is_due(state: LoopState):
    now = state.slots
    return ~now.is_open_M & ((now.row_M < B) | (state.next_row < B))

  def condition(carry):
    count, state = carry
    return (count < M) & is_due(state).any()

  def replace(carry):
    count, state = carry
    m = jnp.argmax(is_due(state))
    written = _write_row(state, m, stop)
    slots = _enter(layers, split, group_size, state, m, B)
    enters = (state.next_row < B).astype(jnp.int32)
    return count + 1, LoopState(state.next_row + enters, slots, *written)

  zero = jnp.zeros((), jnp.int32)
  return jax.lax.while_loop(condition, replace, (zero, state))[1]


def _write_row(
  state: LoopState, m, stop
) -> tuple[base.Completions, Array | None]:
  """The output, with the row of slot `m` written to it unless `m` is empty."""
  now, old = state.slots, state.completions
  B, T = old.mask.shape
  row, length = now.row_M[m], now.length_M[m]
  mask_T = jnp.arange(T) < length
  action_T = jnp.where(mask_T, now.action_MT[m], 0)
  logp_T = jnp.where(mask_T, now.logp_MT[m], 0)
  is_stopped = _is_stop(action_T[length - 1], stop)

  def put(x, new):
    # An empty slot has row B. The update clips it to B - 1, whose values must
    # not change.
    return _put_row(x, row, jnp.where(row < B, new.astype(x.dtype), x[row]))

  completions = base.Completions(
    put(old.action, action_T),
    put(old.logp, logp_T),
    put(old.mask, mask_T),
    put(old.alive, ~is_stopped),
  )
  if state.expert is None:
    return completions, None
  return completions, put(state.expert, now.expert[m])


def _enter(
  layers, split: prefill.SplitPrompt, group_size: int, state: LoopState, m, B
) -> Slots:
  """All slots, with the next row in slot `m`; empty if no row is waiting."""
  now, row = state.slots, state.next_row
  n = jnp.minimum(row, B - 1) // group_size

  # Of an empty slot, one column is read.
  tokens = split.mask_NP[n].sum(dtype=jnp.int32) * (row < B)
  caches = tuple(
    slot_cache.enter(cache, kv_cache.LayerCache(*prompt), split.mask_NP, n, m)
    for cache, (_, *prompt) in zip(now.caches, layers, strict=True)
  )
  return now._replace(
    row_M=_put_row(now.row_M, m, jnp.minimum(row, B)),
    is_open_M=_put_row(now.is_open_M, m, row < B),
    length_M=_put_row(now.length_M, m, jnp.zeros((), jnp.int32)),
    prompt_M=_put_row(now.prompt_M, m, tokens),
    position_M=_put_row(now.position_M, m, split.position_B[n * group_size]),
    token_M=_put_row(now.token_M, m, split.token_B[n * group_size]),
    caches=caches,
  )


def _decode(model, params, layers, now: Slots):
  """Logits [M, 1, V] of the next token, and slots with the current one."""
  c = model.config
  variables = {'params': params}
  contexts = _contexts(c, now)
  x_M1D = model.apply(variables, now.token_M[:, None], method='embed')
  caches, record = [], None if now.expert is None else []
  for i, ((own, _, _), cache) in enumerate(
    zip(layers, now.caches, strict=True)
  ):
    (cos_M1R, sin_M1R), span, kernel = contexts[c.is_local(i)]
    qkv = decode_layer.project(c, own, x_M1D, cos_M1R, sin_M1R)
    cache, seen_M1HW = slot_cache.extend(c, kernel, cache, *qkv, span)
    x_M1D = decode_layer.finish(c, own, x_M1D, seen_M1HW, record)
    caches.append(cache)
  if record is not None:
    expert = jnp.stack([x[:, 0] for x in record], axis=1)
    now = now._replace(expert=_put(now.expert, now.length_M, expert))
  now = now._replace(caches=tuple(caches))
  return model.apply(variables, x_M1D, method='logits'), now


def _contexts(c: transformer.Config, now: Slots):
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
