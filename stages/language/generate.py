"""Completes prompts, one token at a time, until every row has ended."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sharding import rules
from stages import base
from stages.language import kv_cache, sample
from stages.models import rope, transformer


class Start(NamedTuple):
  """Where completions take over from their prompts.

  The last token of a prompt is read with the completion: what follows it is the
  first prediction, so a prompt is only ever read for its keys and values.

  Attributes:
    prompt_NP: tokens of each group's prompt.
    mask_NP: one on all of them but the last.
    token_B: the last.
    position_B: its position.
  """

  prompt_NP: Array
  mask_NP: Array
  token_B: Array
  position_B: Array


def start(prompt: base.Prompt, group_size: int) -> Start:
  """Takes each group's prompt once, and its last token off."""
  token_NP, mask_NP = prompt.token[::group_size], prompt.mask[::group_size]
  last_N = mask_NP.sum(1, dtype=jnp.int32) - 1
  is_last_NP = transformer.positions(mask_NP) == last_N[:, None]
  is_last_NP &= mask_NP > 0
  token_N = jnp.where(is_last_NP, token_NP, 0).sum(1, dtype=token_NP.dtype)
  return Start(
    token_NP,
    jnp.where(is_last_NP, 0, mask_NP),
    jnp.repeat(token_N, group_size),
    jnp.repeat(last_N, group_size),
  )


class Progress(NamedTuple):
  """Where the decoding loop is.

  Every row decodes into the same column at a time, however long it was when the
  loop began: by so many columns its own are turned to the left, so that what it
  came with lies at the far end, and grows from the near one.

  Attributes:
    t: tokens decoded, of each row.
    token_B: the last of them.
    caches: keys and values of what completions read, by layer.
    draft: completions, turned.
  """

  t: Array
  token_B: Array
  caches: tuple[kv_cache.Layer, ...]
  draft: base.Draft


def blank(config: transformer.Config, rows: int, length: int) -> base.Draft:
  """Completions of which there is nothing yet."""
  wide = jnp.promote_types(jnp.dtype(config.dtype), jnp.float32)
  return base.Draft(
    action=jnp.zeros((rows, length), jnp.int32),
    logp=jnp.zeros((rows, length), wide),
    mask=jnp.zeros((rows, length), jnp.float32),
    alive=jnp.ones(rows, bool),
  )


def _turn(x, by_B):
  """`x[row, column, ...]`, every row by so many columns to the left, around."""
  return jax.vmap(lambda x, by: jnp.roll(x, -by, axis=0))(x, by_B)


def _turned(draft: base.Draft, by_B) -> base.Draft:
  return draft._replace(
    action=_turn(draft.action, by_B),
    logp=_turn(draft.logp, by_B),
    mask=_turn(draft.mask, by_B),
  )


def _recall(
  model, params, prompt: base.Prompt, group_size: int, draft: base.Draft
):
  """What completions so far are to whoever goes on with them.

  They are read anew by the parameters that go on, as if those had drawn them: a
  token's log-probability is then one that the trainer can find.

  Returns:
    The token that each row reads next, and its memory by layer, turned.
  """
  begin = start(prompt, group_size)
  (N, P), (B, _) = begin.prompt_NP.shape, draft.mask.shape
  token_BT = jnp.concatenate(
    [begin.token_B[:, None], draft.action[:, :-1]], axis=1
  )

  def join(x_NP, x_BT):
    return jnp.concatenate([jnp.repeat(x_NP, B // N, axis=0), x_BT], axis=1)

  context = model.apply(
    {'params': params},
    join(begin.prompt_NP, token_BT),
    join(begin.mask_NP, draft.mask.astype(begin.mask_NP.dtype)),
    method='read',
  )
  length_B = draft.mask.sum(1, dtype=jnp.int32)

  def own(x_BCKW):
    return jnp.swapaxes(_turn(x_BCKW[:, P:], length_B), 1, 2)

  memory = [
    kv_cache.Layer(own(context.key[i]), own(context.value[i]))
    for i in range(model.config.L)
  ]
  last_B1 = jnp.maximum(length_B - 1, 0)[:, None]
  last_B1 = jnp.take_along_axis(draft.action, last_B1, axis=1)
  token_B = jnp.where(length_B > 0, last_B1[:, 0], begin.token_B)
  return token_B, memory


def _decode(model, params, layers, begin: Start, length_B, progress: Progress):
  """Logits of the next token, and memory that includes this one.

  Args:
    model: what predicts.
    params: its parameters.
    layers: by layer, its parameters and its prompts' keys and values, laid out
      [N, K, P, W].
    begin: where completions start.
    length_B: how long they were when the loop began.
    progress: how far they are.
  """
  c, t = model.config, progress.t
  variables, block = {'params': params}, transformer.Block(model.config)
  position_B1 = (begin.position_B + length_B + t)[:, None]
  cos_B1R, sin_B1R = rope.angles(c.rope, c.W, position_B1)
  T = progress.draft.mask.shape[1]
  column_1T = jnp.arange(T)[None]
  past_BT = (column_1T <= t) | (column_1T >= T - length_B[:, None])
  x_B1D = model.apply(variables, progress.token_B[:, None], method='embed')
  caches = []
  for (own, key_NKPW, value_NKPW), memory in zip(
    layers, progress.caches, strict=True
  ):
    own = {'params': own}
    q_B1HW, k_B1KW, v_B1KW = block.apply(
      own, x_B1D, cos_B1R, sin_B1R, method='project'
    )
    memory = kv_cache.write(memory, t, k_B1KW, v_B1KW)
    seen_B1HW = kv_cache.attend(
      q_B1HW, memory, past_BT, key_NKPW, value_NKPW, begin.mask_NP
    )
    x_B1D = block.apply(own, x_B1D, seen_B1HW, method='close')
    caches.append(memory)
  logit_B1V = model.apply(variables, x_B1D, method='logits')
  return logit_B1V, tuple(caches)


def generate(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  *,
  length: int,
  **kwargs,
) -> base.Experience:
  """Continues each prompt by up to `length` tokens, as `resume` from nothing.

  Returns:
    What was drawn, with the log-probabilities it was drawn with.
  """
  draft = blank(model.config, prompt.token.shape[0], length)
  made = resume(model, params, prompt, key_B, draft, **kwargs)
  return base.Experience(
    obs=prompt,
    action=made.action,
    logp=made.logp,
    mask=made.mask,
    truncated=made.alive.astype(jnp.float32),
  )


def resume(
  model: transformer.Transformer,
  params: base.Params,
  prompt: base.Prompt,
  key_B: base.Key,
  draft: base.Draft,
  *,
  stop: tuple[int, ...] = (),
  sampling: sample.Sampling = sample.Sampling(),
  group_size: int = 1,
  greedy: bool = False,
  begun: int = 0,
  go_on: Callable[[Array], Array] = jnp.any,
) -> base.Draft:
  """Goes on with completions until rows have ended, or enough of them.

  A row's token t is drawn with `fold_in(key, t)`, so its luck depends on
  nothing but its key, and not on where it was interrupted. A row ends with a
  token of `stop`, or when there is no more room.

  Args:
    model: what predicts.
    params: its parameters.
    prompt: what to continue; rows of a group are adjacent and alike.
    key_B: one key a row.
    draft: completions so far, and room for the rest.
    stop: ids of tokens that end a row; the row keeps the one it drew.
    sampling: the distribution to draw from.
    group_size: rows that share a prompt, which is read once for all.
    greedy: take the likeliest token instead.
    begun: how many of the first rows may have tokens; the others have none.
    go_on: `open_B -> bool`: whether to draw one more token of every row that
      has not ended, given which those are; until all have if not given.
  """
  dtype = jnp.dtype(model.config.dtype)
  params = rules.gather(jax.tree.map(lambda x: x.astype(dtype), params))
  begin = start(prompt, group_size)
  context = model.apply(
    {'params': params}, begin.prompt_NP, begin.mask_NP, method='read'
  )
  # Unrolled, since a scan would copy the whole memory at every token; prompts
  # turned once to how every token will read them.
  layers = [
    (
      transformer.layer(params, i),
      jnp.swapaxes(context.key[i], 1, 2),
      jnp.swapaxes(context.value[i], 1, 2),
    )
    for i in range(model.config.L)
  ]
  B, T = draft.mask.shape
  length_B = draft.mask.sum(1, dtype=jnp.int32)
  caches, token_B = kv_cache.empty(model.config, B, T), begin.token_B
  if begun:
    first = jax.tree.map(lambda x: x[:begun], (prompt, draft))
    read = _recall(model, params, first[0], group_size, first[1])
    token_B, caches = jax.tree.map(
      lambda all_, some: all_.at[:begun].set(some), (token_B, [*caches]), read
    )
    draft = _turned(draft, length_B)

  def open_(progress: Progress):
    return progress.draft.alive & (length_B + progress.t < T)

  def wanted(progress: Progress):
    return (progress.t < T) & go_on(open_(progress))

  def extend(progress: Progress) -> Progress:
    t, old, open_B = progress.t, progress.draft, open_(progress)
    logit_B1V, caches = _decode(
      model, params, layers, begin, length_B, progress
    )
    if greedy:
      token_B = jnp.argmax(logit_B1V[:, 0], axis=-1)
    else:
      logit_B1V = sample.shape(logit_B1V, sampling)
      key_now_B = jax.vmap(jax.random.fold_in)(key_B, length_B + t)
      token_B = sample.draw(key_now_B, logit_B1V[:, 0])
    token_B = jnp.where(open_B, token_B, 0).astype(jnp.int32)
    logp_B1 = sample.logp(logit_B1V, token_B[:, None])

    def put(x_BT, x_B):
      # What lies there may be of a row that is longer.
      old_B1 = jax.lax.dynamic_slice_in_dim(x_BT, t, 1, 1)
      x_B = jnp.where(open_B, x_B.astype(x_BT.dtype), old_B1[:, 0])
      return jax.lax.dynamic_update_slice_in_dim(x_BT, x_B[:, None], t, 1)

    ended_B = open_B & jnp.isin(token_B, jnp.array(stop, jnp.int32))
    new = base.Draft(
      put(old.action, token_B),
      put(old.logp, logp_B1[:, 0]),
      put(old.mask, open_B),
      old.alive & ~ended_B,
    )
    return Progress(t + 1, token_B, caches, new)

  now = Progress(jnp.zeros((), jnp.int32), token_B, tuple(caches), draft)
  end = jax.lax.while_loop(wanted, extend, now)
  return _turned(end.draft, -length_B) if begun else end.draft
