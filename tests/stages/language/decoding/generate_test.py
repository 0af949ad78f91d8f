"""Completing prompts, and scoring completions, with a small model of ours."""

import dataclasses
import functools

import chex
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from stages import base
from stages.language import language_model, sample
from stages.language.decoding import parts
from stages.models import transformer

# Fresh weights large enough for attention and the odds to be uneven.
CONFIG = transformer.Config(
  V=31, D=16, L=2, H=4, K=2, W=4, F=20, init_stddev=0.5
)
LENGTHS = [5, 1, 3]
GROUP, T = 3, 8
B = GROUP * len(LENGTHS)
STOP = (2, 7, 11, 23)
CUT = sample.Sampling(temperature=0.8, top_k=9, top_p=0.9)

ACTION = jnp.asarray(
  np.random.default_rng(5).integers(0, CONFIG.V, (B, T)), jnp.int32
)


@functools.cache
def params():
  return language_model.policy(CONFIG, response_length=1).init(
    jax.random.key(0)
  )


@functools.cache
def act(group_size=GROUP, config=CONFIG, **settings):
  settings = {'response_length': T, 'stop': STOP} | settings
  policy = language_model.policy(config, **settings)
  return jax.jit(functools.partial(policy.act, group_size=group_size))


@functools.cache
def evaluate(group_size=GROUP, config=CONFIG, **settings):
  policy = language_model.policy(
    config, response_length=T, stop=STOP, **settings
  )
  return jax.jit(functools.partial(policy.evaluate, group_size=group_size))


def prompts(padding='left', junk=0):
  """One row a completion; every prompt is padded, with `junk`."""
  P = max(LENGTHS) + 2
  token_NP = np.full((len(LENGTHS), P), junk, np.int32)
  mask_NP = np.zeros((len(LENGTHS), P), np.int32)
  for n, length in enumerate(LENGTHS):
    where = slice(P - length, P) if padding == 'left' else slice(length)
    text = np.random.default_rng(n).integers(0, CONFIG.V, length)
    token_NP[n, where], mask_NP[n, where] = text, 1
  return base.Prompt(
    *(jnp.repeat(jnp.asarray(x), GROUP, axis=0) for x in (token_NP, mask_NP))
  )


def keys(seed=0):
  return jax.random.split(jax.random.key(seed), B)


def alike(got: base.Experience, want: base.Experience):
  """The same tokens, and log-probabilities but for rounding."""
  for name in 'action', 'mask', 'truncated':
    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)


def test_a_row_ends_with_its_first_stop_token_and_no_later():
  endless = act(stop=())(params(), prompts(), keys())
  assert (endless.mask == 1).all() and (endless.truncated == 1).all()
  got = act()(params(), prompts(), keys())
  ends = 0
  for b, action in enumerate(np.asarray(endless.action)):
    stops = np.flatnonzero(np.isin(action, STOP))
    ended = len(stops) > 0
    length = stops[0] + 1 if ended else T
    ends += ended
    kept = np.arange(T) < length
    np.testing.assert_array_equal(got.mask[b], kept)
    np.testing.assert_array_equal(got.action[b], action * kept)
    np.testing.assert_allclose(
      got.logp[b], endless.logp[b] * kept, rtol=0, atol=1e-5
    )
    assert got.truncated[b] == (not ended)
  assert 0 < ends < B, 'some rows should end and some not'


def test_decoding_stops_when_every_row_has_ended(monkeypatch):
  draw, steps = sample.draw, []

  def spy(key_B, logit_BV):
    jax.debug.callback(steps.append, 1)
    return draw(key_B, logit_BV)

  monkeypatch.setattr(sample, 'draw', spy)
  policy = language_model.policy(
    CONFIG, response_length=40, stop=tuple(range(0, 31, 2))
  )
  act = jax.jit(functools.partial(policy.act, group_size=GROUP))
  x = act(params(), prompts(), keys())
  jax.effects_barrier()
  assert len(steps) == x.mask.sum(1).max() < 40
  assert (x.truncated == 0).all()


def test_permuting_rows_permutes_completions():
  order = np.random.default_rng(0).permutation(B)
  prompt, key_B = prompts(), keys()
  straight = act(group_size=1)(params(), prompt, key_B)
  shuffled = act(group_size=1)(
    params(), jax.tree.map(lambda x: x[order], prompt), key_B[order]
  )
  alike(shuffled, jax.tree.map(lambda x: x[order], straight))
  another = act(group_size=1)(params(), prompt, keys(1))
  assert (another.action != straight.action).any(1).sum() > B / 2


def test_rows_that_share_a_prompt_are_completed_as_if_each_had_its_own():
  alike(
    act(group_size=GROUP)(params(), prompts(), keys()),
    act(group_size=1)(params(), prompts(), keys()),
  )


PADDED = {
  'right': {'padding': 'right'},
  'other tokens': {'junk': 4},
  'out of range': {'junk': 10**6},
  'negative, right': {'padding': 'right', 'junk': -100},
}


@pytest.mark.parametrize('padded', PADDED.values(), ids=PADDED)
def test_padding_changes_neither_completions_nor_scores(padded):
  prompt, other = prompts(), prompts(**padded)
  x = act()(params(), prompt, keys())
  alike(act()(params(), other, keys())._replace(obs=None), x)
  got = evaluate()(params(), other, x.action)
  want = evaluate()(params(), prompt, x.action)
  chex.assert_trees_all_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize('sampling', [sample.Sampling(), CUT], ids=repr)
def test_evaluating_finds_the_probabilities_that_tokens_were_drawn_with(
  sampling,
):
  x = act(sampling=sampling)(params(), prompts(), keys())
  now = evaluate(sampling=sampling)(params(), prompts(), x.action)
  np.testing.assert_allclose(now.logp * x.mask, x.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize('sampling', [sample.Sampling(), CUT], ids=repr)
def test_evaluating_is_the_textbook_forward(sampling):
  prompt = prompts()
  logit = transformer.Transformer(CONFIG).apply(
    {'params': params()},
    jnp.concatenate([prompt.token, ACTION], 1),
    jnp.concatenate([prompt.mask, jnp.ones_like(ACTION)], 1),
  )
  shaped = sample.shape(logit[:, -T - 1 : -1], sampling, keep_BT=ACTION)
  got = evaluate(sampling=sampling)(params(), prompt, ACTION)
  want = sample.logp(shaped, ACTION), sample.entropy(shaped)
  np.testing.assert_allclose(got.logp, want[0], rtol=0, atol=1e-5)
  np.testing.assert_allclose(got.entropy, want[1], rtol=0, atol=1e-5)


def test_groups_are_evaluated_as_if_each_row_had_its_own_prompt():
  x = act()(params(), prompts(), keys())
  shared, alone = (
    evaluate(group_size=group_size)(params(), prompts(), x.action)
    for group_size in (GROUP, 1)
  )
  np.testing.assert_allclose(shared.logp, alone.logp, rtol=0, atol=1e-5)


def loss(policy, params, bonus=1.0):
  """Some number that every log-probability and entropy has a part in."""
  weight = np.random.default_rng(1).normal(size=(2, B, T))
  now = policy.evaluate(params, prompts(), ACTION, group_size=GROUP)
  return (now.logp * weight[0] + bonus * now.entropy * weight[1]).sum()


@functools.cache
def gradient(config=CONFIG, **settings):
  """`bonus -> value, gradient` of the loss."""
  policy = language_model.policy(
    config, response_length=T, sampling=CUT, **settings
  )
  f = jax.jit(jax.value_and_grad(functools.partial(loss, policy)))
  return functools.partial(f, params())


def same(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)

  def compare(got, want):
    difference = jnp.linalg.norm((got - want).ravel())
    assert difference <= 1e-5 * jnp.linalg.norm(want.ravel())

  jax.tree.map(compare, got[1], want[1])


@pytest.mark.slow
@pytest.mark.parametrize('bonus', [0.0, 1.0])
def test_chunks_of_time_do_not_change_gradients(bonus):
  chunked = gradient(max_live_logits=B * T // 2 * CONFIG.V)
  same(chunked(bonus), gradient()(bonus))


@pytest.mark.parametrize('tokens', claims.some([1, 3, 5, 7], keep=[3]))
def test_chunks_that_do_not_divide_a_row_score_alike(tokens):
  want = evaluate(sampling=CUT)(params(), prompts(), ACTION)
  chunked = evaluate(sampling=CUT, max_live_logits=tokens * B * CONFIG.V)
  got = chunked(params(), prompts(), ACTION)
  np.testing.assert_allclose(got.logp, want.logp, rtol=0, atol=1e-5)
  np.testing.assert_allclose(got.entropy, want.entropy, rtol=0, atol=1e-5)


def arrays(jaxpr):
  """Sizes of all arrays of a program, those of its inner programs too."""
  for equation in jaxpr.eqns:
    yield from (x.aval.size for x in equation.outvars)
    for inner in core.jaxprs_in_params(equation.params):
      yield from arrays(inner)


def test_the_logits_of_a_whole_batch_never_exist():
  config = dataclasses.replace(CONFIG, V=997)
  shapes = jax.eval_shape(
    language_model.policy(config, response_length=T).init, jax.random.key(0)
  )

  def largest(logits):
    policy = language_model.policy(
      config, response_length=T, max_live_logits=logits
    )
    f = functools.partial(loss, policy)
    return max(arrays(jax.make_jaxpr(jax.grad(f))(shapes).jaxpr))

  whole = B * T * config.V
  assert largest(whole) == whole
  assert largest(whole // 4) == whole // 4
  # No smaller than parameters, which here are larger than a token's logits.
  assert largest(1) == config.V * config.D


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['nothing_saveable', 'dots_saveable'])
def test_remat_does_not_change_gradients(remat):
  other = dataclasses.replace(CONFIG, remat=remat)
  same(gradient(config=other)(1.0), gradient()(1.0))


def test_remat_keeps_less():
  def kept(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    f = functools.partial(
      loss, language_model.policy(config, response_length=T)
    )
    _, pullback = jax.eval_shape(lambda p: jax.vjp(f, p), params())
    return sum(x.size for x in jax.tree.leaves(pullback))

  assert kept('nothing_saveable') < kept('none') / 2


def test_probabilities_stay_in_float32_where_arithmetic_is_in_bfloat16():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  x = act(config=config)(params(), prompts(), keys())
  now = evaluate(config=config)(params(), prompts(), x.action)
  assert x.logp.dtype == now.logp.dtype == now.entropy.dtype == jnp.float32
  exact = evaluate()(params(), prompts(), x.action)

  def rms(x_BT):
    return float(jnp.sqrt((x_BT**2).mean()))

  # Eight bits, rounded some ten times on the way.
  error = rms(now.logp - exact.logp)
  assert 0 < error < 10**0.5 * 2**-8 * rms(exact.logp)
  # Drawing and evaluating take the same way, but for the order of their sums.
  assert rms(x.logp - now.logp * x.mask) < error


def test_heads_that_cannot_be_shared_are_refused():
  with pytest.raises(ValueError, match='4 query heads cannot share 3'):
    dataclasses.replace(CONFIG, K=3)


def test_an_unknown_remat_is_refused():
  with pytest.raises(ValueError, match="remat 'some' is neither 'none' nor"):
    dataclasses.replace(CONFIG, remat='some')


def in_parts(monkeypatch, length, **settings):
  """Completions whose keys and values are kept in parts of four columns."""
  monkeypatch.setattr(parts, 'part_columns', lambda T: (4,) * (T // 4))
  act.cache_clear()
  try:
    return act(response_length=length, **settings)(
      params_of(settings), prompts(), keys()
    )
  finally:
    act.cache_clear()


def params_of(settings):
  config = settings.get('config', CONFIG)
  policy = language_model.policy(config, response_length=1)
  return policy.init(jax.random.key(0))


@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'stop': ()},
    {'config': dataclasses.replace(CONFIG, windows=(3, None))},
    {'sampling': CUT},
  ],
)
def test_parts_of_the_caches_change_no_token(monkeypatch, settings):
  want = act(response_length=12, **settings)(
    params_of(settings), prompts(), keys()
  )
  assert want.mask.sum(1).max() > 8  # The last of three parts is reached.
  alike(in_parts(monkeypatch, 12, **settings), want)


def test_columns_of_the_parts_add_up_to_the_length():
  assert parts.part_columns(511) == (511,)
  assert parts.part_columns(1024) == (256,) * 4
  assert parts.part_columns(700) == (384, 316)
  assert parts.part_columns(27_648) == (6_912,) * 4
  for length in (600, 1000, 8192, 10_001):
    assert sum(parts.part_columns(length)) == length
