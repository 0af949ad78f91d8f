"""Continuous batching draws the tokens of a static batch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from planner.costs.decoding import completions
from stages.language import huggingface, language_model, sample
from stages.language.decoding import generate, prefill
from stages.language.decoding.slots import slot_cache
from stages.models import transformer
from tests.stages.language.decoding.generate_test import (
  act,
  alike,
  B,
  CONFIG,
  GROUP,
  keys,
  params,
  prompts,
  STOP,
  T,
)


def jitted(policy, **kwargs):
  return jax.jit(functools.partial(policy.act, group_size=GROUP, **kwargs))


def same(got, want):
  alike(got._replace(obs=None), want._replace(obs=None))


@pytest.mark.parametrize('slots', claims.some([1, 2, 3, 8, B], keep=[1, 3, B]))
def test_any_number_of_slots_draws_the_tokens_of_a_static_batch(slots):
  got = act(slots=slots)(params(), prompts(), keys())
  want = act()(params(), prompts(), keys())
  assert 0 < want.truncated.sum() < B
  same(got, want)


OTHERS = {
  'no group': {'group_size': 1},
  'no stop token': {'stop': ()},
  'top-k and top-p': {'sampling': sample.Sampling(0.8, top_k=9, top_p=0.9)},
}


@pytest.mark.parametrize('settings', OTHERS.values(), ids=OTHERS)
def test_slots_draw_alike_in_other_settings(settings):
  got = act(slots=4, **settings)(params(), prompts('right', junk=4), keys())
  same(got, act(**settings)(params(), prompts('right', junk=4), keys()))


def test_rows_may_arrive_in_any_order():
  order = np.random.default_rng(0).permutation(B)
  prompt, key_B = prompts(), keys()
  straight = act(group_size=1)(params(), prompt, key_B)
  shuffled = act(group_size=1, slots=4)(
    params(), jax.tree.map(lambda x: x[order], prompt), key_B[order]
  )
  same(shuffled, jax.tree.map(lambda x: x[order], straight))


GEMMA = {
  'windows': (3, None),
  'score_softcap': 2.0,
  'query_scale': 0.4,
  'K': 1,
  'post_norms': True,
}
EXPERTS = {'E': 5, 'experts_per_token': 3, 'qk_norm': True}


@pytest.mark.parametrize('model', [{}, GEMMA], ids=['qwen', 'gemma'])
def test_blocks_of_the_cache_see_what_the_whole_of_it_sees(monkeypatch, model):
  config = dataclasses.replace(CONFIG, **model)
  weights = transformer.init_params(config, jax.random.key(0))
  args = weights, prompts(), keys()

  def run(slots):
    policy = language_model.policy(
      config, response_length=21, stop=STOP, slots=slots
    )
    return jitted(policy)(*args)

  want = run(None)
  monkeypatch.setattr(slot_cache, 'BLOCK', 4)
  assert slot_cache.columns(21 + 7) == 28
  same(run(3), want)
  assert 4 * 3 < want.mask.sum(1).max()


@pytest.mark.parametrize(
  'model, greedy', [(GEMMA, False), (EXPERTS, True)], ids=['gemma', 'experts']
)
def test_slots_draw_alike_from_other_models(model, greedy):
  config = dataclasses.replace(CONFIG, **model)
  policies = (
    language_model.policy(config, response_length=T, stop=STOP, slots=slots)
    for slots in (3, None)
  )
  weights = transformer.init_params(config, jax.random.key(0))
  got, want = (
    jitted(x, greedy=greedy)(weights, prompts(), keys()) for x in policies
  )
  same(got, want)
  assert got.mask.sum() < B * T


def test_greedy_rows_are_those_of_the_textbook_forward():
  model = transformer.Transformer(CONFIG)
  forward = jax.jit(lambda *x: model.apply({'params': params()}, *x))
  prompt = prompts()
  token, mask = prompt.token[::GROUP], prompt.mask[::GROUP]
  for _ in range(T):
    logit = forward(
      jnp.pad(token, [(0, 0), (0, T + 7 - token.shape[1])]),
      jnp.pad(mask, [(0, 0), (0, T + 7 - mask.shape[1])]),
    )[:, token.shape[1] - 1]
    token = jnp.concatenate([token, logit.argmax(-1)[:, None]], axis=1)
    mask = jnp.concatenate([mask, jnp.ones_like(mask[:, :1])], axis=1)
  policy = language_model.policy(CONFIG, response_length=T, stop=STOP, slots=2)
  got = jitted(policy, greedy=True)(params(), prompt, keys())
  for action, mask, want in zip(
    got.action, got.mask, np.repeat(token[:, -T:], GROUP, axis=0), strict=True
  ):
    ends = np.flatnonzero(np.isin(want, STOP))
    length = ends[0] + 1 if len(ends) else T
    np.testing.assert_array_equal(mask, np.arange(T) < length)
    np.testing.assert_array_equal(action, want * (np.arange(T) < length))


def test_a_row_enters_in_the_iteration_after_another_has_ended(monkeypatch):
  draw, steps = sample.draw, []

  def spy(key_B, logit_BV):
    jax.debug.callback(lambda: steps.append(1))
    return draw(key_B, logit_BV)

  want = act()(params(), prompts(), keys())
  monkeypatch.setattr(sample, 'draw', spy)
  policy = language_model.policy(CONFIG, response_length=T, stop=STOP, slots=3)
  x = jitted(policy)(params(), prompts(), keys())
  jax.effects_barrier()
  lengths = want.mask.sum(1).astype(int)
  np.testing.assert_array_equal(x.mask.sum(1), lengths)
  # The planner's model of an engine, with steps of a second.
  ends = completions.refill(lengths, lambda *_: 1.0, slots=3)
  assert len(steps) == ends.max() < -(-B // 3) * T


def test_prompts_that_are_read_in_chunks_are_completed_alike(monkeypatch):
  want = act(slots=3)(params(), prompts(), keys())
  monkeypatch.setattr(prefill, 'MAX_PROMPT_TOKENS', 14)  # Two of three.
  policy = language_model.policy(CONFIG, response_length=T, stop=STOP, slots=3)
  got = jitted(policy)(params(), prompts(), keys())
  same(got, want)


@pytest.mark.parametrize('resumes', [False, True])
def test_no_iteration_copies_the_cache(resumes):
  config = dataclasses.replace(CONFIG, dtype='float32')
  length, slots = 500, 4
  policy = language_model.policy(
    config, response_length=length, stop=STOP, slots=slots
  )
  run, args = jitted(policy), (params(), prompts(), keys())
  if resumes:
    run = functools.partial(policy.resume, group_size=GROUP, num_started=GROUP)
    run = jax.jit(run)
    args += (generate.empty_completions(config, B, length),)
  compiled = run.lower(*args).compile()
  P = prompts().token.shape[1]
  shape = f'f32[{slots},{config.K},{slot_cache.columns(P + length)},{config.W}]'
  text = compiled.as_text()
  bodies = set(re.findall(r'body=(%[\w.-]+)', text))
  updates = 0
  for computation in text.split('\n\n'):
    if computation.strip().split(' ')[0] in bodies:
      made = [x for x in computation.splitlines() if f'= {shape}' in x]
      assert not [x for x in made if ' copy(' in x]
      updates += len(made)
  assert updates
  columns = slot_cache.columns(P + length)
  cache = 2 * config.L * slots * config.K * columns * config.W * 4
  if not resumes:  # To read rows again takes more, for these few columns.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * cache


def test_slots_are_refused_where_they_cannot_work():
  with pytest.raises(ValueError, match='With 0 slots no row is decoded'):
    language_model.policy(CONFIG, response_length=T, slots=0)
  with pytest.raises(ValueError, match='leave out one of them'):
    huggingface.policy('none', response_length=T, slots=2, engine=lambda: None)
