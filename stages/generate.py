"""Completes prompts, one token at a time, until every row has ended."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sharding import rules
from stages import base, cache, sample
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


def start(prompt: base.Prompt, group: int) -> Start:
  """Takes each group's prompt once, and its last token off."""
  token_NP, mask_NP = prompt.token[::group], prompt.mask[::group]
  last_N = mask_NP.sum(1, dtype=jnp.int32) - 1
  is_last_NP = transformer.positions(mask_NP) == last_N[:, None]
  is_last_NP &= mask_NP > 0
  token_N = jnp.where(is_last_NP, token_NP, 0).sum(1, dtype=token_NP.dtype)
  return Start(
    token_NP,
    jnp.where(is_last_NP, 0, mask_NP),
    jnp.repeat(token_N, group),
    jnp.repeat(last_N, group),
  )


class Progress(NamedTuple):
  """Where the decoding loop is.

  Attributes:
    t: tokens decoded.
    token_B: the last of them.
    alive_B: rows that have not ended.
    caches: keys and values of what was decoded, by layer.
    action_BT: all of them; zero after the end.
    logp_BT: their log-probabilities.
    mask_BT: one where a row was alive.
  """

  t: Array
  token_B: Array
  alive_B: Array
  caches: tuple[cache.Layer, ...]
  action_BT: Array
  logp_BT: Array
  mask_BT: Array


def _decode(model, params, layers, begin: Start, progress: Progress):
  """Logits of the next token, and memory that includes this one.

  Args:
    model: what predicts.
    params: its parameters.
    layers: by layer, its parameters and its prompts' keys and values, laid out
      [N, K, P, W].
    begin: where completions start.
    progress: how far they are.
  """
  c, t = model.config, progress.t
  variables, block = {'params': params}, transformer.Block(model.config)
  position_B1 = (begin.position_B + t)[:, None]
  cos_B1R, sin_B1R = rope.angles(c.rope, c.W, position_B1)
  x_B1D = model.apply(variables, progress.token_B[:, None], method='embed')
  caches = []
  for (own, key_NKPW, value_NKPW), memory in zip(
    layers, progress.caches, strict=True
  ):
    own = {'params': own}
    q_B1HW, k_B1KW, v_B1KW = block.apply(
      own, x_B1D, cos_B1R, sin_B1R, method='project'
    )
    memory = cache.write(memory, t, k_B1KW, v_B1KW)
    seen_B1HW = cache.attend(
      q_B1HW, memory, t, key_NKPW, value_NKPW, begin.mask_NP
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
  stop: tuple[int, ...] = (),
  sampling: sample.Sampling = sample.Sampling(),
  group: int = 1,
  greedy: bool = False,
) -> base.Experience:
  """Continues each prompt by up to `length` tokens.

  A row's token t is drawn with `fold_in(key, t)`, so its luck depends on
  nothing but its key. The loop ends when every row has drawn a token of `stop`.

  Args:
    model: what predicts.
    params: its parameters.
    prompt: what to continue; rows of a group are adjacent and alike.
    key_B: one key a row.
    length: most tokens a completion may have.
    stop: ids of tokens that end a row; the row keeps the one it drew.
    sampling: the distribution to draw from.
    group: rows that share a prompt, which is read once for all.
    greedy: take the likeliest token instead.

  Returns:
    What was drawn, with the log-probabilities it was drawn with.
  """
  dtype = jnp.dtype(model.config.dtype)
  params = rules.gather(jax.tree.map(lambda x: x.astype(dtype), params))
  begin = start(prompt, group)
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
  B = prompt.token.shape[0]
  wide = jnp.promote_types(dtype, jnp.float32)

  def go_on(progress: Progress):
    return (progress.t < length) & progress.alive_B.any()

  def extend(progress: Progress) -> Progress:
    t, alive_B = progress.t, progress.alive_B
    logit_B1V, caches = _decode(model, params, layers, begin, progress)
    if greedy:
      token_B = jnp.argmax(logit_B1V[:, 0], axis=-1)
    else:
      logit_B1V = sample.shape(logit_B1V, sampling)
      key_now_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, t)
      token_B = sample.draw(key_now_B, logit_B1V[:, 0])
    token_B = jnp.where(alive_B, token_B, 0).astype(jnp.int32)
    logp_B1 = sample.logp(logit_B1V, token_B[:, None])

    def put(x_BT, x_B):
      x_B = jnp.where(alive_B, x_B, 0).astype(x_BT.dtype)
      return jax.lax.dynamic_update_slice_in_dim(x_BT, x_B[:, None], t, 1)

    return Progress(
      t + 1,
      token_B,
      alive_B & ~jnp.isin(token_B, jnp.array(stop, jnp.int32)),
      caches,
      put(progress.action_BT, token_B),
      put(progress.logp_BT, logp_B1[:, 0]),
      put(progress.mask_BT, alive_B),
    )

  end = jax.lax.while_loop(
    go_on,
    extend,
    Progress(
      jnp.zeros((), jnp.int32),
      begin.token_B,
      jnp.ones(B, bool),
      cache.empty(model.config, B, length),
      jnp.zeros((B, length), jnp.int32),
      jnp.zeros((B, length), wide),
      jnp.zeros((B, length), jnp.float32),
    ),
  )
  return base.Experience(
    obs=prompt,
    action=end.action_BT,
    logp=end.logp_BT,
    mask=end.mask_BT,
    truncated=end.alive_B.astype(jnp.float32),
  )
