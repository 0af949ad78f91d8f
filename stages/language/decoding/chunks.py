"""Generation in chunks of tokens, between which a caller may look at the rows.

A server streams tokens, ends rows at texts and drops rows whose client has
left. It calls `start` once a batch, and then `advance` until all rows are done.
The temperature and the limit of tokens differ by row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stages import base
from stages.language import sample
from stages.language.decoding import generate, kv_cache, prefill
from stages.language.decoding.slots import slot_rows
from stages.models import transformer
from stages.models.layers import attention


class Rows(NamedTuple):
  """Settings of sampling, by row.

  Attributes:
    key: key of each row; token t is drawn with `fold_in(key, t)`.
    temperature: divides the logits.
    greedy: rows that take the likeliest token; their log-probabilities are
      those at the temperature given.
    limit: most tokens of the row; 0 ends it.
  """

  key: base.Key
  temperature: Float[Array, ' B']
  greedy: Bool[Array, ' B']
  limit: Int[Array, ' B']


class _Sampling(NamedTuple):
  """A distribution whose temperature differs by row, for `sample.shape`."""

  temperature: Array
  top_k: int
  top_p: float


class Batch(NamedTuple):
  """A batch under way: what `start` returns and `advance` moves on.

  Attributes:
    cache: keys and values of the prompts.
    split: the prompts.
    state: the state of the decoding loop.
  """

  cache: attention.PromptCache
  split: prefill.SplitPrompt
  state: generate.DecodeState


def start(
  model: transformer.Transformer, params, prompt: base.Prompt, length: int
) -> Batch:
  """Reads prompts; no token is sampled yet.

  Args:
    model: the model.
    params: its parameters.
    prompt: one prompt a row.
    length: most tokens that a row may have room for.
  """
  split = prefill.split_prompt(prompt, 1)
  params = transformer.compute_params(model.config, params)
  cache = model.apply(
    {'params': params}, split.prompt_NP, split.mask_NP, method='prefill'
  )
  B = prompt.token.shape[0]
  state = generate.DecodeState(
    jnp.zeros((), jnp.int32),
    split.token_B,
    tuple(kv_cache.empty(model.config, B, length)),
    generate.empty_completions(model.config, B, length),
  )
  return Batch(cache, split, state)


def advance(
  model: transformer.Transformer,
  params,
  batch: Batch,
  rows: Rows,
  *,
  num_tokens: int,
  stop: tuple[int, ...],
  sampling: sample.Sampling = sample.Sampling(),
) -> Batch:
  """Samples up to `num_tokens` more tokens of each unfinished row.

  Args:
    model: the model.
    params: its parameters.
    batch: the batch so far.
    rows: how each row is sampled.
    num_tokens: most tokens to add.
    stop: ids of tokens that end a row; the row keeps that token.
    sampling: top-k and top-p; the temperature is that of `rows`.
  """
  params = transformer.compute_params(model.config, params)
  layers = prefill.cached_layers(model, params, batch.cache)
  first_t, no_tokens_B = batch.state.t, jnp.zeros_like(rows.limit)
  T = batch.state.completions.mask.shape[1]
  by_row = _Sampling(
    rows.temperature[:, None, None], sampling.top_k, sampling.top_p
  )

  def open_rows(state):
    return state.completions.alive & (state.t < rows.limit)

  def condition(state):
    has_room = (state.t < T) & (state.t < first_t + num_tokens)
    return has_room & open_rows(state).any()

  def extend(state):
    open_B = open_rows(state)
    x_B1D, state = generate.decode_states(
      model, params, layers, batch.split, no_tokens_B, state
    )
    logit_B1V = model.apply({'params': params}, x_B1D, method='logits')
    likeliest_B = jnp.argmax(logit_B1V[:, 0], axis=-1)
    logit_B1V = sample.shape(logit_B1V, by_row)
    key_t_B = jax.vmap(jax.random.fold_in, (0, None))(rows.key, state.t)
    drawn_B = sample.draw(key_t_B, logit_B1V[:, 0])
    token_B = jnp.where(rows.greedy, likeliest_B, drawn_B)
    token_B = jnp.where(open_B, token_B, 0).astype(jnp.int32)
    logp_B = sample.logp(logit_B1V, token_B[:, None])[:, 0]
    ends_B = slot_rows.is_stop(token_B, stop)
    new = generate.append(state, open_B, token_B, logp_B, ends_B)
    return state._replace(t=state.t + 1, token_B=token_B, completions=new)

  return batch._replace(
    state=jax.lax.while_loop(condition, extend, batch.state)
  )
