"""Attention in chunks of queries, against attention written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlinf_jax.planning.compiled import hlo
from stages.models.layers import attention

B, T, P, H, K, W = 2, 13, 4, 6, 2, 8
C = P + T


def problem(dtype='float32', T=T):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  return draw(B, T, H, W), draw(B, P + T, K, W), draw(B, P + T, K, W)


def mask(window=None, T=T):
  """Prompts padded on the left; positions do not count padding."""
  is_key_BC = jnp.arange(P + T)[None] >= jnp.array([[0], [3]])
  if window is None:
    return attention.Mask(is_key_BC)
  position_BC = jnp.cumsum(is_key_BC, axis=1) - 1
  return attention.causal(is_key_BC, window, position_BC[:, P:], position_BC)


def written_out(q, k, v, window=None, softcap=None):
  """The definition, a query at a time, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  position = np.array([np.arange(C), np.arange(C) - 3])
  for b, t, h in np.ndindex(*q.shape[:3]):
    near = position[b, P + t] - position[b] < (window or C)
    seen = (np.arange(C) <= P + t) & (position[b] >= 0) & near
    score = k[b, seen, h // (H // K)] @ q[b, t, h] / W**0.5
    if softcap:
      score = softcap * np.tanh(score / softcap)
    weight = np.exp(score - score.max())
    out[b, t, h] = weight / weight.sum() @ v[b, seen, h // (H // K)]
  return out


@pytest.mark.parametrize('chunk', [T, 5, 1])
@pytest.mark.parametrize(
  'settings', [{}, {'window': 3}, {'softcap': 2.0}], ids=str
)
def test_chunks_of_queries_compute_the_definition(settings, chunk):
  window = settings.get('window')
  got = attention.attention(
    *problem(),
    mask(window),
    softcap=settings.get('softcap'),
    max_live_scores=B * H * C * chunk,
  )
  want = written_out(*problem(), **settings)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('chunk', [T, 5])
def test_a_bidirectional_mask_is_that_of_a_single_block(chunk):
  is_key_BC = mask().key_BC
  block = jnp.zeros((B, C), jnp.int32)
  orders = attention.Bidirectional(), attention.Blocks(block[:, P:], block)
  for order in orders:
    got = attention.Mask(is_key_BC, order).dense(T, T - chunk, chunk)
    want = np.repeat(np.asarray(is_key_BC)[:, None], chunk, axis=1)
    np.testing.assert_array_equal(got, want)


def gradients(chunk, dtype='float32', window=3, **kwargs):
  def loss(q, k, v):
    seen = attention.attention(
      q, k, v, mask(window), max_live_scores=B * H * C * chunk, **kwargs
    )
    return (seen.astype(jnp.float32) ** 2).sum()

  return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*problem(dtype))


@pytest.mark.parametrize('softcap', [None, 2.0])
def test_gradients_do_not_depend_on_chunks(softcap):
  whole = gradients(T, softcap=softcap)
  for got, want in zip(gradients(4, softcap=softcap), whole, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_of_keys_are_summed_over_chunks_in_float32():
  want = gradients(T, dtype='float32')
  for one, other in zip(gradients(1, dtype='bfloat16'), want, strict=True):
    error = np.linalg.norm(np.asarray(one, np.float32) - other)
    assert error < 0.01 * np.linalg.norm(other)


def test_no_array_has_all_scores():
  T = 64

  def loss(max_live_scores, q, k, v):
    return attention.attention(
      q, k, v, mask(T=T), max_live_scores=max_live_scores
    ).sum()

  def largest(max_live_scores):
    gradient = jax.grad(functools.partial(loss, max_live_scores), (0, 1, 2))
    text = jax.jit(gradient).lower(*problem(T=T)).compile().as_text()
    module = hlo.parse(text)
    return max(
      array.bytes
      for executed in hlo.walk(module)
      for array in executed.instruction.arrays
    )

  scores = B * H * T * (P + T)
  assert largest(scores) >= 4 * scores
  assert largest(scores // 8) <= scores
