"""The counted work of attention kernels, against what they compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.costs.mesh import layout
from planner.counting import count, divisions, kernels
from sharding import rules
from stages.models.layers import attention, cudnn

B, H, K, W = 4, 4, 2, 64
LAYOUT = layout.Layout(rules.DEFAULT)
CAUSAL = attention.Causal()


def call(phase, T, C, query_block=128, key_block=128):
  shapes = (B, H, T, W), (B, K, C, W), (B, K, C, W)
  return kernels.splash(f'splash_mha_{phase}', shapes, query_block, key_block)


@pytest.mark.parametrize(
  'sizes', [(128, 128, 128, 128), (512, 1536, 128, 512), (768, 896, 256, 128)]
)
def test_pairs_are_those_of_blocks_with_a_key_that_is_seen(sizes):
  T, C, query_block, key_block = sizes
  sees_TC = np.arange(C)[None] <= np.arange(T)[:, None] + C - T
  blocks = sees_TC.reshape(T // query_block, query_block, -1, key_block)
  seen = blocks.any((1, 3)).sum() * query_block * key_block
  assert call('fwd', *sizes).pairs == seen


def test_a_kernel_multiplies_by_queries_keys_and_values():
  pairs, heads = 128 * 128, B * H
  for phase, products in (('fwd', 2), ('dq', 3), ('dkv', 4)):
    flops = call(phase, 128, 128).matmul_flops
    assert flops == 2 * heads * pairs * W * products


def step(implementation, order, T, gradient, q, k, v):
  """Attention of T tokens, or its gradients."""

  def loss(q, k, v):
    mask = attention.Mask(jnp.ones((B, T), bool), order)
    return attention.attention(
      q, k, v, mask, implementation=implementation
    ).sum()

  return jax.grad(loss, (0, 1, 2))(q, k, v) if gradient else loss(q, k, v)


def work(
  implementation,
  T,
  *,
  order=CAUSAL,
  gradient=False,
  axes=(),
  platform='tpu',
):
  fn = functools.partial(step, implementation, order, T, gradient)
  letters = ['B', '', 'H', ''], ['B', '', 'K', ''], ['B', '', 'K', '']
  return count.work(
    fn,
    *(jax.ShapeDtypeStruct((B, T, n, W), jnp.bfloat16) for n in (H, K, K)),
    letters=letters,
    division=divisions.Division(axes, LAYOUT) if axes else None,
    platform=platform,
  )


def test_one_block_multiplies_as_much_as_attention_written_out():
  kernel, written = work('splash', 128), work('chunked', 128)
  assert kernel.matmul_flops == written.matmul_flops > 0


def test_a_long_sequence_multiplies_half_as_much_and_stores_no_scores():
  T = 8192
  for gradient in (False, True):
    kernel = work('auto', T, gradient=gradient)
    written = work('chunked', T, gradient=gradient)
    # Nine products in place of five: chunks compute scores again, and no
    # gradient needs the two of their forward pass.
    products = 9 / 5 if gradient else 1
    ratio = kernel.matmul_flops / written.matmul_flops
    assert ratio == pytest.approx(products / 2 * (1 + 512 / T), rel=1e-4)
    assert kernel.bytes_alive < written.bytes_alive
    half = work('auto', T // 2, gradient=gradient)
    assert kernel.bytes_alive == pytest.approx(2 * half.bytes_alive, rel=0.05)


def test_devices_share_the_bytes_of_a_kernel_and_not_its_operations():
  alone = work('auto', 512, gradient=True)
  shared = work('auto', 512, gradient=True, axes=(('tensor', 2),))
  assert shared.matmul == alone.matmul
  # Each has the segments of all keys, which are not of heads.
  assert 0.5 < shared.bytes_alive / alone.bytes_alive < 0.7


def test_a_kernel_is_counted_on_its_own_hardware_alone():
  assert work('auto', 512, platform='cpu') == work('chunked', 512)
  assert work('auto', 512) == work('splash', 512)


# Pairs of queries and keys in blocks of `TILE`, of T tokens.
PAIRS = {
  CAUSAL: lambda T: T * (T + kernels.TILE) / 2,
  attention.Bidirectional(): lambda T: T * T,
}


@pytest.mark.parametrize(
  ('order', 'mask_type'),
  [*zip(PAIRS, ('PADDING_CAUSAL', 'PADDING'), strict=True)],
)
def test_cudnn_multiplies_blocks_of_its_mask_in_two_kernels(order, mask_type):
  T = 4096
  shapes = (B, T, H, W), (B, T, K, W), (B, T, K, W)
  for phase, products in (('fwd', 2), ('bwd', 5)):
    flops = kernels.cudnn(phase, shapes, mask_type).matmul_flops
    assert flops == 2 * B * H * PAIRS[order](T) * W * products


@pytest.mark.skipif(not cudnn.is_here(), reason='JAX finds no cuDNN here.')
@pytest.mark.parametrize('order', PAIRS)
def test_calls_of_cudnn_are_counted_on_a_gpu(order):
  T, heads = 4096, B * H
  for gradient, products in ((False, 2), (True, 2 + 5)):
    count = functools.partial(
      work, 'auto', order=order, gradient=gradient, platform='gpu'
    )
    found = count(T)
    pairs = PAIRS[order](T)
    assert found.matmul['bfloat16'] == 2 * heads * pairs * W * products
    assert found.bytes_alive == pytest.approx(
      2 * count(T // 2).bytes_alive, rel=0.05
    )


def test_another_kernel_is_refused_by_name():
  with pytest.raises(NotImplementedError, match='mine is a kernel that cannot'):
    kernels.check('mine')
