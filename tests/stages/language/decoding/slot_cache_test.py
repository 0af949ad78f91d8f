"""Attention of a query in a slot, by interpreted kernels and without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import mesh as mesh_lib
from stages import kernels
from stages.language import language_model
from stages.language.decoding import kv_cache
from stages.language.decoding.slots import decode_kernels, slot_cache
from tests.stages.language.decoding.generate_test import (
  act,
  alike,
  CONFIG,
  GROUP,
  keys,
  params,
  prompts,
  STOP,
)

M, C = 5, 512
LONG = {'response_length': 21, 'stop': STOP}
WIDE = dataclasses.replace(CONFIG, W=16)
# Columns of each slot before the new one: none, a block but one, all but one.
SIZES = jnp.array([0, 127, 128, 300, C - 1], jnp.int32)
BF16 = {'dtype': 'bfloat16'}
CAP = {'score_softcap': 2.0, 'query_scale': 0.4}


def problem(dtype, config=WIDE):
  rng = np.random.default_rng(0)

  def draw(*shape):
    # Numbers that bfloat16 has: the kernel for TPUs rounds to it.
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(dtype)

  cache = kv_cache.LayerCache(*(draw(M, config.K, C, config.W) for _ in 'kv'))
  q, k, v = (draw(M, 1, heads, config.W) for heads in (config.H, 2, 2))
  return cache, q, k, v


def extended(kernel, dtype, window=None, config=WIDE):
  """The cache with new columns, and what their queries see."""
  span = slot_cache.span(SIZES, SIZES >= 0, window)
  return slot_cache.extend(config, kernel, *problem(dtype), span)


def textbook(window, config):
  """Attention written out, in float64, of rows one by one."""
  (key, value), q, k, v = jax.tree.map(
    lambda x: np.asarray(x, np.float64), problem('float32')
  )
  scale = config.query_scale or config.W**-0.5
  cap = config.score_softcap
  seen = np.zeros_like(q)
  for m, size in enumerate(np.asarray(SIZES)):
    start = 0 if window is None else max(size + 1 - window, 0)
    for h in range(config.H):
      g = h // (config.H // config.K)
      own_key = np.concatenate([key[m, g, start:size], k[m, :, g]])
      own_value = np.concatenate([value[m, g, start:size], v[m, :, g]])
      score = own_key @ q[m, 0, h] * scale
      score = score if cap is None else cap * np.tanh(score / cap)
      weight = np.exp(score - score.max())
      seen[m, 0, h] = weight / weight.sum() @ own_value
  return seen


CASES = {
  'GPUs': (kernels.DECODE_ATTENTION, None, {}),
  'GPUs, window': (kernels.DECODE_ATTENTION, 40, {'query_scale': 0.4}),
  'TPUs': (kernels.PAGED_ATTENTION, None, {}),
  'TPUs, soft cap': (kernels.PAGED_ATTENTION, None, CAP),
  'blocks, window, soft cap': (kernels.BLOCKS, 40, CAP),
  'whole, window, soft cap': (kernels.WHOLE, 40, CAP),
}


@pytest.mark.parametrize('kernel, window, model', CASES.values(), ids=CASES)
def test_a_query_sees_what_the_textbook_says(kernel, window, model):
  config = dataclasses.replace(WIDE, **model)
  cache, seen = extended(kernel, 'float32', window, config)
  want = textbook(window, config)
  np.testing.assert_allclose(seen, want, rtol=1e-5, atol=1e-5)
  (key, value), _, k, v = problem('float32')
  for got, old, new in (cache.key, key, k), (cache.value, value, v):
    want = np.array(old)
    want[np.arange(M), :, np.asarray(SIZES)] = new[:, 0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('kernel', kernels.OF_DECODING)
def test_a_kernel_reads_no_block_behind_the_last_token(monkeypatch, kernel):
  block = 128
  monkeypatch.setattr(decode_kernels, 'PAGE', block)
  monkeypatch.setattr(decode_kernels, 'SPLITS', 2)  # Of two blocks each.
  cache, want = extended(kernels.WHOLE, 'float32')
  end_M1 = (SIZES // block + 1)[:, None] * block
  is_behind_MC = jnp.arange(C)[None] >= end_M1
  assert is_behind_MC.any(1).sum() == M - 1
  # A sum with NaN is NaN, also if its weight is zero.
  spoilt = (
    jnp.where(is_behind_MC[:, None, :, None], jnp.nan, x) for x in cache
  )
  _, q_M1HW, _, _ = problem('float32')
  got = decode_kernels.attention(
    kernel,
    q_M1HW.reshape(M, WIDE.K, -1, WIDE.W),
    *spoilt,
    jnp.zeros_like(SIZES),
    SIZES + 1,
    scale=WIDE.W**-0.5,
    softcap=None,
  )
  np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize('kernel', kernels.OF_DECODING)
def test_in_bfloat16_a_kernel_is_as_near_to_float32_as_the_whole_cache(kernel):
  exact = textbook(None, WIDE)

  def error(kernel):
    _, seen = extended(kernel, 'bfloat16')
    return np.linalg.norm(np.asarray(seen, np.float64) - exact)

  assert error(kernel) < 0.01 * np.linalg.norm(exact)
  assert error(kernel) < 2 * error(kernels.WHOLE)


@pytest.mark.parametrize('kernel', [*kernels.OF_DECODING, kernels.BLOCKS])
def test_devices_that_share_the_heads_see_what_one_sees(kernel):
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 2, 'tensor': 2})
  want = extended(kernel, 'float32')
  with jax.set_mesh(mesh):
    got = jax.jit(functools.partial(extended, kernel, 'float32'))()
  for one, other in zip(
    jax.tree.leaves(got), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def completed(monkeypatch, kernel, config):
  """Completions of slots whose cache a kernel reads in several blocks."""
  monkeypatch.setitem(kernels.DECODING, 'cpu', kernel)
  for module in slot_cache, decode_kernels:
    monkeypatch.setattr(module, 'BLOCK', 16)
  monkeypatch.setattr(slot_cache, 'SHORTEST', 16)
  policy = language_model.policy(config, slots=3, **LONG)
  found = {}
  run = functools.partial(policy.act, group_size=GROUP)
  run = jax.jit(kernels.recorded(run, found))
  got = run(params(), prompts('right', junk=4), keys())
  assert kernels.Choice(kernel) in found['cpu']
  assert got.mask.sum(1).max() > 16
  return got


def test_with_a_kernel_slots_draw_the_tokens_of_a_static_batch(monkeypatch):
  got = completed(monkeypatch, kernels.DECODE_ATTENTION, CONFIG)
  want = act(**LONG)(params(), prompts('right', junk=4), keys())
  alike(got._replace(obs=None), want._replace(obs=None))


def distance_to_scoring(got, config):
  """Root mean square of the difference of log-probabilities, in nats."""
  policy = language_model.policy(config, **LONG)
  score = jax.jit(functools.partial(policy.evaluate, group_size=GROUP))
  want = score(params(), got.obs, got.action).logp
  gap = np.asarray((got.logp - want) * got.mask, np.float64)
  return np.sqrt((gap**2).sum() / np.asarray(got.mask).sum())


@pytest.mark.claims
@pytest.mark.parametrize('kernel', kernels.OF_DECODING)
def test_in_bfloat16_slots_with_a_kernel_are_as_near_to_scoring_as_without(
  monkeypatch, kernel
):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  ours, theirs = (
    distance_to_scoring(completed(monkeypatch, name, config), config)
    for name in (kernel, kernels.BLOCKS)
  )
  assert ours < 1.5 * theirs


REFUSED = {
  'soft cap': ('gpu', CAP | BF16, False, 'scores have a soft cap'),
  'float32': ('gpu', {}, False, 'in float32, and the kernel in bfloat16'),
  'width': ('gpu', BF16 | {'W': 80}, False, 'width 80, and not one of'),
  'window': ('tpu', BF16 | {'W': 128}, True, 'a sliding window'),
  'lanes': (
    'tpu',
    BF16 | {'W': 64},
    False,
    'width 64, and not a multiple of 128',
  ),
  'float32 on TPUs': ('tpu', {'W': 128}, False, 'the kernel in bfloat16'),
  'short': ('tpu', {'W': 128}, None, 'completions are short'),
  'off': ('tpu', {'attention': 'chunked'}, False, "attention is 'chunked'"),
}


@pytest.mark.parametrize(
  'platform, model, is_local, why', REFUSED.values(), ids=REFUSED
)
def test_a_kernel_is_refused_where_it_cannot_work(
  platform, model, is_local, why
):
  config = dataclasses.replace(CONFIG, **model)
  with jax.sharding.use_abstract_mesh(mesh_lib.abstract({}, platform)):
    choice = slot_cache.choose_kernel(
      config, C if is_local is not None else 128, bool(is_local)
    )
  assert choice.name == kernels.WHOLE
  assert why in choice.why


def test_a_later_jax_may_lack_the_kernel(monkeypatch):
  monkeypatch.setattr(decode_kernels, 'decode_attention', None)
  config = dataclasses.replace(CONFIG, W=128, **BF16)
  with jax.sharding.use_abstract_mesh(mesh_lib.abstract({}, 'gpu')):
    choice = slot_cache.choose_kernel(config, C, False)
  assert choice.name == kernels.WHOLE
  assert choice.why.endswith(f'JAX {jax.__version__} no longer has it')


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_the_hardware_has_its_kernel(platform):
  config = dataclasses.replace(CONFIG, W=128, dtype='bfloat16')
  with jax.sharding.use_abstract_mesh(mesh_lib.abstract({}, platform)):
    choice = slot_cache.choose_kernel(config, C, False)
  assert choice == kernels.Choice(kernels.DECODING[platform])


@pytest.mark.parametrize('tokens', [1, 128, 129, 2048, 2049, 9000, 28672])
def test_columns_are_whole_blocks_and_a_sixteenth_more_at_most(tokens):
  count = slot_cache.columns(tokens)
  assert tokens <= count < tokens + max(128, tokens / 8)
  assert tokens <= 128 or count % 128 == 0
