"""Completions that an earlier call has left unfinished."""

import jax
import jax.numpy as jnp

from stages import base
from stages.language.decoding import kv_cache, prefill


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
  (N, P), (B, _) = split.prompt_NP.shape, completions.mask.shape
  token_BT = jnp.concatenate(
    [split.token_B[:, None], completions.action[:, :-1]], axis=1
  )

  def after_prompt(x_NP, x_BT):
    return jnp.concatenate([jnp.repeat(x_NP, B // N, axis=0), x_BT], axis=1)

  cache = model.apply(
    {'params': params},
    after_prompt(split.prompt_NP, token_BT),
    after_prompt(split.mask_NP, completions.mask.astype(split.mask_NP.dtype)),
    method='prefill',
  )
  length_B = completions.mask.sum(1, dtype=jnp.int32)

  def own(x_BCKW):
    return jnp.swapaxes(_roll_rows(x_BCKW[:, P:], length_B), 1, 2)

  caches = [
    kv_cache.LayerCache(own(cache.key[i]), own(cache.value[i]))
    for i in range(model.config.L)
  ]
  return last_token(split, completions, length_B), caches
