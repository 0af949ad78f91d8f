"""Continuous batching: waiting rows enter decode slots as others end.

A static batch decodes until its longest row has ended, and rows that ended
earlier are still computed. Here a fixed number of slots decodes in one compiled
loop. When a row ends, its tokens are written to the output and the next waiting
row takes its slot. This is the iteration-level scheduling of Orca (OSDI '22).

Every iteration writes the keys, values and tokens of all slots to one column,
the same for all. The next iteration takes the next column, and the first one
follows the last: a ring of T columns or more. A row has at most T tokens, so it
never overwrites its own. Older columns of a slot belong to its earlier rows and
are masked. Writing one column is an update in place; a different column in each
slot would be a scatter, which is slow.
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
)
from stages.language.decoding import generate as static
from stages.models import transformer
from stages.models.layers import attention, rope

# When no row is waiting and at most 1 / SHRINK of the slots hold a row, the
# loop continues with 1 / SHRINK of the slots.
SHRINK = 4


class Slots(NamedTuple):
  """Rows that are being decoded, one in each of M slots.

  Attributes:
    row_M: index of the row; B, the number of rows, where a slot is empty.
    is_open_M: whether the row has not ended.
    start_M: iteration that decodes the row's first token.
    position_M: position of the last token of its prompt.
    token_M: latest token.
    mask_MP: 1 on the tokens of its prompt except the last.
    prompts: keys and values of the prompts by layer, [M, K, P, W].
    rings: keys and values of the completions by layer, [M, K, C, W]. C is
      `kv_cache.ring_columns(T)`.
    action_MT: sampled tokens, in a ring.
    logp_MT: their log-probabilities, in a ring.
    expert: experts of the tokens read, in a ring, [M, T, L, k]; or None.
  """

  row_M: Array
  is_open_M: Array
  start_M: Array
  position_M: Array
  token_M: Array
  mask_MP: Array
  prompts: tuple[kv_cache.LayerCache, ...]
  rings: tuple[kv_cache.LayerCache, ...]
  action_MT: Array
  logp_MT: Array
  expert: Array | None = None


class LoopState(NamedTuple):
  """State of the decoding loop.

  Attributes:
    t: number of iterations so far.
    next_row: index of the next row to enter a slot.
    slots: the rows that are being decoded.
    completions: the rows that have ended.
    expert: their experts, [B, T, L, k]; or None.
  """

  t: Array
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
    t, now = state.t, state.slots
    logit_M1V, now = _decode(model, params, layers, t, now)
    key_M = key_B[jnp.minimum(now.row_M, B - 1)]
    token_M, logit_M1V = sample.next_token(
      logit_M1V, key_M, t - now.start_M, sampling, greedy
    )
    logp_M = sample.logp(logit_M1V, token_M[:, None])[:, 0]
    is_full_M = t + 1 - now.start_M >= length
    now = now._replace(
      is_open_M=now.is_open_M & ~is_full_M & ~_is_stop(token_M, stop),
      token_M=token_M,
      action_MT=_put_column(now.action_MT, t, token_M),
      logp_MT=_put_column(now.logp_MT, t, logp_M),
    )
    return replace(state._replace(t=t + 1, slots=now))

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
  P, columns = split.mask_NP.shape[1], kv_cache.ring_columns(length)
  layers, prompts, rings = kv_cache.empty_after(
    layers, config, (slots, P), (slots, columns)
  )

  def zeros(*shape, dtype=jnp.int32):
    return jnp.zeros((slots, *shape), dtype)

  return layers, LoopState(
    t=jnp.zeros((), jnp.int32),
    next_row=jnp.zeros((), jnp.int32),
    slots=Slots(
      row_M=jnp.full(slots, rows, jnp.int32),
      is_open_M=zeros(dtype=bool),
      start_M=zeros(),
      position_M=zeros(),
      token_M=zeros(),
      mask_MP=zeros(P, dtype=split.mask_NP.dtype),
      prompts=prompts,
      rings=rings,
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


def _put_column(x_MT, t, x_M):
  """Writes one column of a ring."""
  x_M1 = x_M[:, None].astype(x_MT.dtype)
  return jax.lax.dynamic_update_slice_in_dim(x_MT, x_M1, t % x_MT.shape[1], 1)


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
    return count + 1, LoopState(
      state.t, state.next_row + enters, slots, *written
    )

  zero = jnp.zeros((), jnp.int32)
  return jax.lax.while_loop(condition, replace, (zero, state))[1]


def _write_row(
  state: LoopState, m, stop
) -> tuple[base.Completions, Array | None]:
  """The output, with the row of slot `m` written to it unless `m` is empty."""
  now, old = state.slots, state.completions
  B, T = old.mask.shape
  row, start = now.row_M[m], now.start_M[m]
  length = state.t - start
  order_T = (start + jnp.arange(T)) % T
  mask_T = jnp.arange(T) < length
  action_T = jnp.where(mask_T, now.action_MT[m, order_T], 0)
  logp_T = jnp.where(mask_T, now.logp_MT[m, order_T], 0)
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
  return completions, put(state.expert, now.expert[m, order_T])


def _enter(
  layers, split: prefill.SplitPrompt, group_size: int, state: LoopState, m, B
) -> Slots:
  """All slots, with the next row in slot `m`; empty if no row is waiting."""
  now, row = state.slots, state.next_row
  n = jnp.minimum(row, B - 1) // group_size

  def put_prompt(cache_MKCW, prompt_NKPW):
    prompt_1KPW = jax.lax.dynamic_slice_in_dim(prompt_NKPW, n, 1, axis=0)
    return jax.lax.dynamic_update_slice(
      cache_MKCW, prompt_1KPW.astype(cache_MKCW.dtype), (m, 0, 0, 0)
    )

  prompts = tuple(
    kv_cache.LayerCache(put_prompt(cache.key, key), put_prompt(cache.value, v))
    for cache, (_, key, v) in zip(now.prompts, layers, strict=True)
  )
  return now._replace(
    row_M=_put_row(now.row_M, m, jnp.minimum(row, B)),
    is_open_M=_put_row(now.is_open_M, m, row < B),
    start_M=_put_row(now.start_M, m, state.t),
    position_M=_put_row(now.position_M, m, split.position_B[n * group_size]),
    token_M=_put_row(now.token_M, m, split.token_B[n * group_size]),
    mask_MP=_put_row(now.mask_MP, m, split.mask_NP[n]),
    prompts=prompts,
  )


def _decode(model, params, layers, t, now: Slots):
  """Logits [M, 1, V] of the next token, and slots with the current one."""
  c = model.config
  variables = {'params': params}
  contexts = _contexts(c, t, now)
  x_M1D = model.apply(variables, now.token_M[:, None], method='embed')
  rings, record = [], None if now.expert is None else []
  for i, (own, _, _) in enumerate(layers):
    (cos_M1R, sin_M1R), *where = contexts[c.is_local(i)]
    q_M1HW, k_M1KW, v_M1KW = decode_layer.project(
      c, own, x_M1D, cos_M1R, sin_M1R
    )
    column = t % now.rings[i].key.shape[2]
    ring = kv_cache.update(now.rings[i], column, k_M1KW, v_M1KW)
    seen_M1HW = kv_cache.ring_attention(c, q_M1HW, now.prompts[i], ring, *where)
    x_M1D = decode_layer.finish(c, own, x_M1D, seen_M1HW, record)
    rings.append(ring)
  column = t % now.action_MT.shape[1]
  expert = routing_replay.put(now.expert, column, record)
  now = now._replace(rings=tuple(rings), expert=expert)
  return model.apply(variables, x_M1D, method='logits'), now


def _contexts(c: transformer.Config, t, now: Slots):
  """Rotary angles and arguments of attention, for layers of each kind.

  The key says whether a layer has a window. The arguments are the last four of
  `kv_cache.ring_attention`: the masks [M, P] of the prompt and [M, C] of the
  ring, the iteration, and the age of the oldest column to read.
  """
  C = now.rings[0].key.shape[2]
  length_M = t - now.start_M
  position_M1 = (now.position_M + length_M)[:, None]
  is_prompt_MP = now.mask_MP > 0
  age_C = (t - jnp.arange(C)) % C
  is_own_MC = age_C[None] <= length_M[:, None]
  # Of unfinished rows only; empty slots would count as old ones.
  reach = jnp.where(now.is_open_M, length_M, 0).max()
  angles = rope.angles(c.rope, c.W, position_M1)
  contexts = {False: (angles, is_prompt_MP, is_own_MC, t, reach)}
  if c.window is not None:
    position_MP = transformer.positions(now.mask_MP)
    is_near_M1P = attention.within_window(position_M1, position_MP, c.window)
    contexts[True] = (
      rope.angles(c.local_rope or c.rope, c.W, position_M1),
      is_prompt_MP & is_near_M1P[:, 0],
      is_own_MC & (age_C < c.window)[None],
      t,
      jnp.minimum(reach, c.window - 1),
    )
  return contexts
