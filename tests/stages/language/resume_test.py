"""Interrupted completions are resumed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base
from stages.language import language_model
from stages.language.decoding import generate
from tests.stages.language.decoding.generate_test import (
  act,
  alike,
  B,
  CONFIG,
  CUT,
  GROUP,
  keys,
  params,
  prompts,
  STOP,
  T,
)


@functools.cache
def resume(num_started=B, should_continue=jnp.any, **settings):
  policy = language_model.policy(
    CONFIG, response_length=T, stop=STOP, **settings
  )
  return jax.jit(
    functools.partial(
      policy.resume,
      group_size=GROUP,
      num_started=num_started,
      should_continue=should_continue,
    )
  )


def completions_of(x: base.Experience) -> base.Completions:
  return base.Completions(x.action, x.logp, x.mask, x.truncated > 0)


def cut(x: base.Experience, length_B) -> base.Completions:
  """The completions of `x` when its rows had these lengths."""
  kept_BT = x.mask * (np.arange(T)[None] < length_B[:, None])
  return base.Completions(
    jnp.where(kept_BT > 0, x.action, 0),
    x.logp * kept_BT,
    kept_BT,
    (x.truncated > 0) | (kept_BT.sum(1) < x.mask.sum(1)),
  )


def same(got: base.Completions, want: base.Experience):
  alike(
    base.Experience(None, *got[:3], got.alive.astype(jnp.float32)),
    want._replace(obs=None),
  )


@pytest.mark.parametrize('padding', ['left', 'right'])
@pytest.mark.parametrize('settings', [{}, {'sampling': CUT}], ids=str)
def test_interrupted_rows_equal_uninterrupted_ones(settings, padding):
  prompt = prompts(padding)
  want = act(**settings)(params(), prompt, keys())
  for seed in range(3):
    length_B = np.random.default_rng(seed).integers(0, T + 1, B)
    some = cut(want, length_B)
    assert 0 < (some.mask.sum(1) < want.mask.sum(1)).sum() < B
    same(resume(**settings)(params(), prompt, keys(), some), want)


def test_resuming_without_tokens_equals_generating():
  draft = generate.empty_completions(CONFIG, B, T)
  same(
    resume()(params(), prompts(), keys(), draft),
    act()(params(), prompts(), keys()),
  )


def test_started_rows_and_new_rows_are_generated_together():
  want = act()(params(), prompts(), keys())
  draft = cut(want, np.where(np.arange(B) < GROUP, 3, 0))
  same(resume(num_started=GROUP)(params(), prompts(), keys(), draft), want)


def test_generation_stops_when_enough_rows_have_ended():
  want = act()(params(), prompts(), keys())
  at = sorted(want.mask.sum(1).tolist())[1]
  assert at < T
  until_two = resume(
    num_started=0, should_continue=lambda open_B: open_B.sum() > B - 2
  )
  empty = generate.empty_completions(CONFIG, B, T)
  draft = until_two(params(), prompts(), keys(), empty)
  # Every row stops at the length of the second row that ended.
  np.testing.assert_array_equal(
    draft.mask.sum(1), np.minimum(want.mask.sum(1), at)
  )
  same(resume()(params(), prompts(), keys(), draft), want)


def test_a_row_that_has_ended_does_not_change():
  want = act()(params(), prompts(), keys())
  got = resume()(params(), prompts(), keys(1), completions_of(want))
  np.testing.assert_array_equal(got.action, want.action)
  np.testing.assert_array_equal(got.logp, want.logp)
  np.testing.assert_array_equal(got.alive, want.truncated > 0)
