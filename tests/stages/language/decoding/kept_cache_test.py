"""Turns with a cache that is kept equal turns that read everything again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.language import language_model
from stages.language.decoding import generate
from stages.models import transformer
from tests.stages.language.decoding.continuous_test import EXPERTS, GEMMA
from tests.stages.language.decoding.generate_test import (
  B,
  CONFIG,
  GROUP,
  keys,
  prompts,
  STOP,
)

T, TURNS, MAX_ANSWER = 24, 4, 3


@functools.cache
def turn(config, keep: bool, greedy: bool):
  """Plays one turn, with a cache or without."""
  policy = language_model.policy(config, response_length=T, stop=STOP)

  @jax.jit
  def run(params, prompt, completions, cache):
    if keep:
      kwargs = {'cache': cache, 'max_unread': MAX_ANSWER}
    else:
      kwargs = {'num_started': B}
    settings = {'group_size': GROUP, 'greedy': greedy}
    got = policy.resume(
      params, prompt, keys(), completions, **settings, **kwargs
    )
    return got if keep else (got, cache)

  return run, policy.empty_cache(B)


def answered(completions: base.Completions, rng) -> base.Completions:
  """Some rows that have ended go on after an answer of some tokens."""
  rows = [np.array(x) for x in completions]
  action_BT, _, mask_BT, alive_B = rows
  for i in np.flatnonzero(~alive_B & (rng.random(B) < 0.7)):
    length, said = int(mask_BT[i].sum()), rng.integers(1, MAX_ANSWER + 1)
    if length + said < T:
      new = slice(length, length + said)
      action_BT[i, new] = rng.integers(0, CONFIG.V, said)
      mask_BT[i, new], alive_B[i] = 1, True
  return base.Completions(*(jnp.asarray(x) for x in rows))


@pytest.mark.parametrize('padding', ['left', 'right'])
@pytest.mark.parametrize(
  'model, greedy',
  [({}, False), (GEMMA, False), (EXPERTS, True)],
  ids=['qwen', 'gemma', 'experts'],
)
def test_turns_with_a_kept_cache(model, greedy, padding):
  config = dataclasses.replace(CONFIG, **model)
  params = transformer.init_params(config, jax.random.key(0))
  prompt, rng = prompts(padding, junk=4), np.random.default_rng(0)
  (kept, cache), (read, _) = (turn(config, x, greedy) for x in (True, False))
  now = generate.empty_completions(config, B, T)
  continued = 0
  for _ in range(TURNS):
    want, _ = read(params, prompt, now, None)
    now, cache = kept(params, prompt, now, cache)
    np.testing.assert_array_equal(now.action, want.action)
    np.testing.assert_array_equal(now.mask, want.mask)
    np.testing.assert_array_equal(now.alive, want.alive)
    np.testing.assert_allclose(now.logp, want.logp, atol=1e-5)
    np.testing.assert_array_equal(cache.length, now.mask.sum(1))
    now = answered(now, rng)
    continued += int(now.alive.sum())
  # Rows of several turns, and full ones, beside which others went on.
  assert continued > 2 * B and now.mask.min(1).max() == 1


def test_in_float64_they_agree_to_its_rounding(in_float64):
  config = dataclasses.replace(CONFIG, dtype='float64')
  params = transformer.init_params(config, jax.random.key(0))
  rng = np.random.default_rng(1)
  (kept, cache), (read, _) = (turn(config, x, False) for x in (True, False))
  now = generate.empty_completions(config, B, T)
  for _ in range(TURNS):
    want, _ = read(params, prompts(), now, None)
    now, cache = kept(params, prompts(), now, cache)
    np.testing.assert_array_equal(now.action, want.action)
    np.testing.assert_allclose(now.logp, want.logp, rtol=1e-9, atol=1e-12)
    now = answered(now, rng)
