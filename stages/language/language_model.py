"""A policy from a language model: it acts by completing prompts."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from sharding import row_map, rules
from stages import base, core, ranges
from stages.language import sample, value_model
from stages.language.decoding import (
  continuous,
  generate,
  kept_cache,
  routing_replay,
)
from stages.language.decoding import stop_texts as stop_texts_lib
from stages.language.decoding.slots import kept_rows, slot_cache
from stages.language.scoring import scorer
from stages.models import transformer

# Logits on a device at once while scoring: 2^26 are 256 MiB in float32.
MAX_LIVE_LOGITS = 2**26


def policy(
  config: transformer.Config,
  *,
  response_length: ranges.PositiveInt,
  stop: tuple[int, ...] = (),
  sampling: sample.Sampling = sample.Sampling(),
  init: Callable[[base.Key], base.Params] | None = None,
  max_live_logits: ranges.PositiveInt = MAX_LIVE_LOGITS,
  slots: ranges.PositiveInt | None = None,
  packed_tokens: ranges.PositiveInt | None = None,
  replay_routing: bool = False,
  stop_texts: stop_texts_lib.StopTexts | None = None,
) -> base.Policy:
  """A policy from a decoder-only transformer.

  Sampling and scoring give a token the same log-probability to float32's
  rounding. If `config.dtype` is narrower, they differ more, and the policy sets
  `recompute_logp`. Where parameters have a head of values under the key
  `base.CRITIC`, as `value_model.head` describes, `evaluate` returns its values.

  Args:
    config: dimensions of the model.
    response_length: maximum tokens of a completion.
    stop: ids of the tokens that end a completion.
    sampling: distribution to sample from, and to score actions under.
    init: `key -> params`, such as those of a checkpoint; random weights if
      None.
    max_live_logits: maximum number of logits on a device at once while scoring;
      longer batches are scored in chunks of time, which the backward pass
      recomputes.
    slots: rows that a device decodes at once; waiting rows take the place of
      rows that have ended. The tokens are the same. None to decode all rows
      until the longest has ended. Where the model reads pictures, unfinished
      rows cannot be carried to another step.
    packed_tokens: tokens that a packed row has room for; completions are then
      scored in packed rows, see `packing`, one on each device at a time. None
      to score all of them together, padded to the longest possible.
    replay_routing: whether experts are recorded while sampling, for training
      and scoring, see `routing_replay`. Unfinished rows cannot be carried to
      another step then.
    stop_texts: texts that end a completion besides `stop`; None for none.

  Raises:
    ValueError: for no slots, for packed rows or recorded experts of a model
      that has none, and, as it is called, for prompts and completions that are
      longer than the model has positions for.
  """
  if slots is not None and slots < 1:
    raise ValueError(
      f'With {slots} slots no row is decoded: give one slot or more, or None '
      'to decode all rows at once.'
    )
  if config.vision is not None and packed_tokens is not None:
    raise ValueError(
      f'Completions are packed (packed_tokens={packed_tokens}), and those of a '
      'model that reads pictures cannot be: leave packed_tokens out (PACKED in '
      'gin).'
    )
  if replay_routing:
    routing_replay.check(config)
  model = transformer.Transformer(config)

  act, resume, empty_cache, empty_kept, engine = _decoders(
    model,
    response_length,
    slots,
    stop=stop,
    stop_texts=stop_texts,
    sampling=sampling,
  )
  if replay_routing:
    resume = empty_cache = empty_kept = None
  score_states = functools.partial(
    _score_states, config, sampling, max_live_logits
  )

  within = functools.partial(_within_positions, config, response_length)
  evaluate = within(scorer.scorer(model, score_states, packed_tokens))
  random = functools.partial(transformer.init_params, config)
  # Decoding and scoring add in another order. Below float32, the sums are
  # rounded apart, by up to some tenths of a nat for unlikely tokens.
  narrow = jnp.dtype(config.dtype) != config.param_dtype
  return base.Policy(
    init or random,
    within(act),
    evaluate,
    resume=resume and within(resume),
    empty_cache=empty_cache,
    empty_kept=empty_kept,
    recompute_logp=narrow,
    engine=engine,
    sampling=sampling,
    round_params=(
      functools.partial(transformer.compute_params, config) if narrow else None
    ),
    packed_tokens=packed_tokens,
    trains_router=config.E > 0,
    replays_routing=replay_routing,
  )


def _decoders(
  model: transformer.Transformer, length: int, slots: int | None, **settings
) -> tuple[
  Callable,
  Callable | None,
  Callable | None,
  Callable | None,
  core.EngineCost | None,
]:
  """The policy's `act`, `resume`, caches and `engine`; see `policy`."""
  act = functools.partial(generate.generate, model, length=length, **settings)
  resume = None
  if model.config.vision is None:
    resume = functools.partial(generate.resume, model, **settings)
  if slots is None:
    empty = functools.partial(kept_cache.empty, model.config, length=length)
    return act, resume, resume and empty, None, None
  work = functools.partial(slot_cache.attention_work, model.config, length)
  engine = core.slots_cost(act, resume, slots, work)
  settings['slots'] = slots
  act = functools.partial(continuous.generate, model, length=length, **settings)
  if resume:
    resume = functools.partial(continuous.resume, model, **settings)
  empty = functools.partial(kept_rows.empty, model.config, length=length)
  return act, resume, None, resume and empty, engine


def _within_positions(
  config: transformer.Config, length: int, call: Callable
) -> Callable:
  """`call(params, prompt, …)`, refused if the model lacks positions for it."""

  @functools.wraps(call)
  def checked(params, prompt, *args, **settings):
    P, most = prompt.token.shape[1], config.max_positions
    if most is not None and P + length > most:
      raise ValueError(
        f'A prompt of up to {P} tokens and a completion of up to {length} need '
        f'{P + length} positions, and the model has {most} '
        '(max_position_embeddings in its config.json): lower prompt_length or '
        'response_length (PROMPT or LENGTH in gin), or extend the model by '
        'rope_scaling in its config.json.'
      )
    return call(params, prompt, *args, **settings)

  return checked


def _score_states(
  config, sampling, max_live_logits: int, params, x_BTD, action_BT
) -> base.Evaluation:
  """Scores actions by the states before them; with values for a critic."""
  score = functools.partial(_score, config, sampling)
  chunk = _chunk_length(action_BT.shape, config.V, max_live_logits)
  scored = row_map.map_rows(
    functools.partial(_in_chunks, config, score, chunk),
    {name: params[name] for name in transformer.output_names(config)},
    x_BTD,
    action_BT,
    dtype=config.dtype,
  )
  if base.CRITIC not in params:
    return scored
  return scored._replace(value=value_model.head_values(config, params, x_BTD))


def _score(config, sampling, params, x_BTD, action_BT) -> base.Evaluation:
  logit_BTV = transformer.output_logits(config, params, x_BTD)
  logit_BTV = sample.shape(logit_BTV, sampling, keep_BT=action_BT)
  return base.Evaluation(
    sample.logp(logit_BTV, action_BT), sample.entropy(logit_BTV)
  )


def _chunk_length(shape: tuple[int, int], V: int, max_live_logits: int) -> int:
  """The tokens of a row to score at once.

  There are the fewest chunks that keep [B, t, V] within a limit on a device.
  """
  B, T = shape
  B //= rules.devices_of('B', B)
  V //= rules.devices_of('V', V)
  n = -(-T // max(1, max_live_logits // (B * V)))
  return -(-T // n)


def _in_chunks(config, score, t: int, params, x_BTD, action_BT):
  """Scores `t` tokens of each row at once."""
  B, T, _ = x_BTD.shape
  n = -(-T // t)
  if n == 1:
    return score(params, x_BTD, action_BT)

  def split(x):
    padding = [(0, 0), (0, n * t - T)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding).reshape(B, n, t, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  chunks = jax.tree.map(split, (x_BTD, action_BT))
  # In the loop, each chunk would round the whole matrix again.
  params = transformer.round_output(config, params)
  recomputed = jax.checkpoint(score)
  scores = jax.lax.map(lambda chunk: recomputed(params, *chunk), chunks)
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(B, n * t)[:, :T], scores
  )
