"""Gradients of π0's encoder of images in bfloat16, against float32's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import bfloat16
from stages.models.vision import vit
from stages.vla.pi0 import pi0

B, SIZE, PATCH = 64, 32, 4  # 4,096 patches.
PARTS = 'vision', 'projector'


def config(dtype):
  gemma = functools.partial(pi0.GEMMA, V=4, D=24, L=1, H=2, K=1, W=8, F=16)
  tower = vit.Config(
    image_size=SIZE, patch_size=PATCH, D=16, L=1, H=2, F=32, dtype=dtype
  )
  return pi0.Config(tower, gemma(dtype=dtype), gemma(dtype=dtype))


def test_gradients_of_all_leaves_are_near_those_of_float32():
  rng = np.random.default_rng(0)
  # Numbers of bfloat16, so that arithmetic alone differs.
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), 'bfloat16')
  shapes = pi0.param_shapes(config('float32'))
  params = jax.tree.map(
    lambda x: (draw(*x.shape) / 4).astype('float32'),
    {part: shapes[part] for part in PARTS},
  )
  image = draw(B, SIZE, SIZE, 3)
  # Of patches that agree: sums in bfloat16 stop growing.
  cotangent = 1 + draw(B, (SIZE // PATCH) ** 2, 24)

  def loss(dtype, params):
    own = config(dtype)
    x_BPD = pi0.embed_images(own, params, image.astype(dtype))
    return (x_BPD.astype('float32') * cotangent.astype('float32')).sum()

  want, got = (
    jax.jit(jax.grad(functools.partial(loss, dtype)))(params)
    for dtype in ('float32', 'bfloat16')
  )
  # A bias of all keys changes no attention weight.
  for tree in want, got:
    del tree['vision']['layers']['key_bias_HW']
  errors = bfloat16.errors(want, got)
  assert max(errors.values()) < 0.01, errors
