"""Kernels of attention, against attention in chunks of queries.

That for TPUs is interpreted. The calls of cuDNN are computed by XLA here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import mesh as mesh_lib
from stages.models.layers import attention, cudnn

B, T, P, H, K, W = 4, 131, 20, 4, 2, 16
BIDIRECTIONAL = attention.Bidirectional()


def problem(dtype='float32', T=T, C=P + T):
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  return draw(B, T, H, W), draw(B, C, K, W), draw(B, C, K, W)


def completions():
  """Completions after prompts, which are padded on the left and in between."""
  at_1C = jnp.arange(P + T)[None]
  is_key_BC = at_1C >= jnp.array([[0], [7], [19], [20]])
  return attention.Mask(is_key_BC & (at_1C != 11))


def prompts():
  """Prompts padded on the left, on the right, or not at all."""
  at_1T = jnp.arange(T)[None]
  first_B1 = jnp.array([[0], [40], [0], [129]])
  last_B1 = jnp.array([[T], [T], [50], [T]])
  return attention.Mask((at_1T >= first_B1) & (at_1T < last_B1))


def packed():
  """Rows of several sequences each, and padding behind them."""
  at_1T = jnp.arange(T)[None]
  ends = jnp.array([[30, 31, 120], [1, 60, T], [50, 100, 101], [2, 3, 4]])
  group = sum((at_1T >= ends[:, i : i + 1]).astype(jnp.int32) for i in range(3))
  group = jnp.where(group < 3, group, -1)
  segment = attention.Segment(group, None)
  mask = attention.Mask(group >= 0)
  return mask._replace(segment_BT=segment, segment_BC=segment)


def bidirectional():
  """Prompts with padding in between, too; the last row is padding alone."""
  kept = np.arange(T) % 5 > 0
  is_kept_BC = np.where(np.arange(B)[:, None] < 3, kept[None], False)
  return attention.Mask(prompts().key_BC & is_kept_BC, BIDIRECTIONAL)


def after_prompts():
  """Completions that attend to all of themselves and of their prompts."""
  return attention.Mask(completions().key_BC, BIDIRECTIONAL)


MASKS = {
  'completions': completions,
  'prompts': prompts,
  'packed': packed,
  'bidirectional': bidirectional,
  'after_prompts': after_prompts,
}
CAUSAL = 'completions', 'prompts', 'packed'
LONG = 'completions', 'after_prompts'  # Those with keys of prompts.


def arrays(name, dtype='float32'):
  return problem(dtype, C=P + T if name in LONG else T)


def loss(name, implementation, settings, q, k, v):
  """A function of all that tokens see; what padding sees is arbitrary."""
  mask = MASKS[name]()
  seen = attention.attention(
    q, k, v, mask, implementation=implementation, **settings
  )
  is_token = mask.key_BC[:, -T:, None, None]
  seen = jnp.where(is_token, seen.astype(jnp.float32), 0.0)
  return jnp.sin(seen).sum(), seen


def results(name, implementation, settings, dtype='float32'):
  fn = functools.partial(loss, name, implementation, settings)
  run = jax.jit(jax.value_and_grad(fn, (0, 1, 2), has_aux=True))
  (_, seen), gradients = run(*arrays(name, dtype))
  return seen, *gradients


def agree(got, want, tolerance=1e-5):
  for one, other in zip(got, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('softcap', [None, 2.0])
@pytest.mark.parametrize('name', CAUSAL)
def test_splash_computes_what_chunks_do(name, softcap):
  settings = {'softcap': softcap, 'scale': softcap and 0.3}
  got = results(name, 'splash', settings)
  agree(got, results(name, 'chunked', settings))


@pytest.mark.parametrize('scale', [None, 0.3])
@pytest.mark.parametrize('name', [x for x in MASKS if x != 'packed'])
def test_the_call_of_cudnn_means_what_chunks_compute(name, scale):
  got = results(name, 'cudnn', {'scale': scale})
  agree(got, results(name, 'chunked', {'scale': scale}))


@pytest.mark.parametrize('T', [128, T])
def test_the_call_of_cudnn_without_padding_sees_all_keys(T):
  q, k, v = problem(T=T, C=T)

  def loss(attend, q, k, v):
    return jnp.sin(attend(q, k, v)).sum()

  run = jax.value_and_grad(loss, (1, 2, 3))
  kernel = functools.partial(cudnn.attention, is_key_BC=None, is_causal=False)
  (got, ours), (want, theirs) = (
    run(attend, q, k, v) for attend in (kernel, attention.bidirectional)
  )
  agree((got, *ours), (want, *theirs))


@pytest.mark.parametrize('implementation', ['splash', 'cudnn'])
def test_in_bfloat16_a_kernel_is_as_near_to_float32_as_chunks_are(
  implementation,
):
  want = results('completions', 'chunked', {})
  ours, theirs = (
    results('completions', name, {}, 'bfloat16')
    for name in (implementation, 'chunked')
  )
  for one, other, exact in zip(ours, theirs, want, strict=True):

    def error(x, exact=exact):
      return np.linalg.norm(np.asarray(x, np.float32) - exact)

    assert error(one) < 0.02 * np.linalg.norm(exact)
    assert error(one) < 2 * error(other)


@pytest.mark.parametrize('implementation', ['splash', 'cudnn'])
@pytest.mark.parametrize(
  'axes', [{'fsdp': 2, 'tensor': 2}, {'data': 2, 'fsdp': 2}], ids=str
)
def test_devices_compute_their_own_rows_and_heads(axes, implementation):
  want = results('completions', implementation, {})
  mesh = mesh_lib.mesh(jax.devices()[:4], axes)
  with jax.set_mesh(mesh):
    got = results('completions', implementation, {})
  agree(got, want, 1e-6)


@pytest.mark.parametrize('implementation', ['splash', 'cudnn'])
def test_what_a_backward_pass_computes_again_changes_nothing(implementation):
  fn = functools.partial(loss, 'prompts', implementation, {})
  again = jax.checkpoint(fn, policy=jax.checkpoint_policies.nothing_saveable)
  run = jax.jit(jax.grad(again, (0, 1, 2), has_aux=True))
  gradients, seen = run(*arrays('prompts'))
  agree((seen, *gradients), results('prompts', implementation, {}), 1e-6)
