"""A policy from a language model: it acts by completing prompts."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from stages import base
from stages.language import generate, sample
from stages.models import transformer

# Logits in memory at once while scoring: 2^26 are 256 MiB in float32.
MAX_LIVE_LOGITS = 2**26


def policy(
  config: transformer.Config,
  *,
  response_length: int,
  stop: tuple[int, ...] = (),
  sampling: sample.Sampling = sample.Sampling(),
  init: Callable[[base.Key], base.Params] | None = None,
  max_live_logits: int = MAX_LIVE_LOGITS,
) -> base.Policy:
  """A policy from a decoder-only transformer.

  Sampling and scoring give a token the same log-probability to float32's
  rounding. If `config.dtype` is narrower, they differ more, and the policy sets
  `recompute_logp`.

  Args:
    config: dimensions of the model.
    response_length: maximum tokens of a completion.
    stop: ids of the tokens that end a completion.
    sampling: distribution to sample from, and to score actions under.
    init: `key -> params`, such as those of a checkpoint; random weights if
      None.
    max_live_logits: maximum number of logits in memory at once while scoring;
      longer batches are scored in chunks of time, which the backward pass
      recomputes.
  """
  model = transformer.Transformer(config)

  settings = {'stop': stop, 'sampling': sampling}
  act = functools.partial(
    generate.generate, model, length=response_length, **settings
  )
  resume = functools.partial(generate.resume, model, **settings)

  def evaluate(params, prompt, action_BT, *, group_size=1):
    split = generate.split_prompt(prompt, group_size)
    token_BT = jnp.concatenate(
      [split.token_B[:, None], action_BT[:, :-1]], axis=1
    )
    x_BTD = model.apply(
      {'params': params},
      split.prompt_NP,
      split.mask_NP,
      token_BT,
      split.position_B,
      method='hidden_states',
    )
    score = functools.partial(_score, model, params, sampling)
    return _in_chunks(score, x_BTD, action_BT, config.V, max_live_logits)

  random = functools.partial(transformer.init_params, config)
  # Decoding and scoring add in another order. Below float32, the sums are
  # rounded apart, by up to some tenths of a nat for unlikely tokens.
  narrow = jnp.dtype(config.dtype) != config.param_dtype
  return base.Policy(
    init or random, act, evaluate, resume=resume, recompute_logp=narrow
  )


def _score(model, params, sampling, x_BTD, action_BT) -> base.Evaluation:
  logit_BTV = model.apply({'params': params}, x_BTD, method='logits')
  logit_BTV = sample.shape(logit_BTV, sampling, keep_BT=action_BT)
  return base.Evaluation(
    sample.logp(logit_BTV, action_BT), sample.entropy(logit_BTV)
  )


def _in_chunks(score, x_BTD, action_BT, V: int, max_live_logits: int):
  """Scores in the fewest chunks of time that keep [B, t, V] within a limit."""
  B, T, _ = x_BTD.shape
  n = -(-T // max(1, max_live_logits // (B * V)))
  if n == 1:
    return score(x_BTD, action_BT)
  t = -(-T // n)
  n = -(-T // t)

  def split(x):
    padding = [(0, 0), (0, n * t - T)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding).reshape(B, n, t, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  chunks = jax.tree.map(split, (x_BTD, action_BT))
  scores = jax.lax.map(lambda chunk: jax.checkpoint(score)(*chunk), chunks)
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(B, n * t)[:, :T], scores
  )
