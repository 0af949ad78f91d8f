"""Gradients of OpenVLA and OpenVLA-OFT in bfloat16, against float32's.

Weights are numbers of bfloat16, so that arithmetic alone differs. Half of all
tokens are one, actions lie above what heads predict, and so do returns: in
sums, errors of single tokens cancel, and gradients do not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bfloat16
from stages import base
from stages.language import sample
from stages.models import lora, transformer
from stages.models.layers import initialize
from stages.models.vision import vit
from stages.vla import pictures, trunk_lora
from stages.vla.openvla import (
  action_tokens,
  film,
  openvla,
  openvla_oft,
  openvla_oft_policy,
  openvla_policy,
)

# 8,192 patches of each camera.
B, SIZE, PATCH, P, Z, A, O = 128, 16, 2, 6, 4, 2, 3
BINS, V, OFTEN, D = 16, 64, 5, 16
# Without a trunk: 4,096 patches, and as many actions. XLA adds up blocks of 32
# by 32 on CPUs, so that sums over short chunks would hide their rounding.
ROWS, CHUNK = 64, 64
STATS = action_tokens.ActionStats(-np.ones(A), np.ones(A), np.ones(A, bool))
HEAD = 'state_projector'
FROZEN = 'dino', 'siglip', 'projector', 'llama'


def model(dtype):
  tower = functools.partial(
    vit.Config, image_size=SIZE, patch_size=PATCH, L=2, H=2, dtype=dtype
  )
  dino = tower(D=D, F=24, has_class=True, registers=2, layer_scale=True)
  llama = transformer.Config(
    V=V,
    D=D,
    L=2,
    H=2,
    K=2,
    W=8,
    F=24,
    qkv_bias=False,
    tie_embeddings=False,
    dtype=dtype,
  )
  seen = pictures.Pictures(sizes=(SIZE, SIZE))
  return openvla.Config(dino, tower(D=12, F=16), llama, 8, BINS, seen)


def oft(dtype, **settings):
  config = openvla_oft.Config(model(dtype), Z, A, O, cameras=2, **settings)
  critic = config.head == 'token'
  return openvla_oft_policy.policy(config, STATS, critic=critic)


def adapted(dtype):
  """A policy with adapters in its language model alone."""
  return trunk_lora.wrap(oft(dtype), lora.Lora(rank=2), FROZEN, 'llama')


def draw(rng, *shape):
  return jnp.asarray(rng.normal(size=shape), 'bfloat16').astype('float32')


def parameters(rng, policy):
  """Those of a policy: scales around one, all others around zero.

  Embeddings are of size one: rows that are alike would be rounded alike.
  """

  def leaf(path, x):
    name = path[-1].key
    is_scale = initialize.is_vector(path) and 'bias' not in name
    return is_scale + draw(rng, *x.shape) / (1 if name == 'embed_VD' else 4)

  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(leaf, shapes)


def observation(rng, cameras):
  shape = cameras, B, SIZE, SIZE, 3
  images = (*jnp.asarray(rng.integers(160, 256, shape, np.uint8)),)
  token = rng.integers(0, V, (B, P), np.int32)
  length = rng.integers(3, P + 1, (B, 1))
  mask = (np.arange(P)[None] < length).astype(np.int32)
  prompt = base.Prompt(jnp.asarray(token), jnp.asarray(mask))
  if cameras == 1:
    return openvla_policy.Observation(images[0], prompt)
  return openvla_oft.Observation(images, prompt, 1 + draw(rng, B, O))


def tokens(rng, rows, number):
  first = model('float32').tokens.start
  action = rng.integers(0, BINS, (rows, number))
  action = np.where(rng.random(action.shape) < 0.5, OFTEN, action)
  return jnp.asarray(first + action, jnp.int32)


def reinforcement(policy, params, obs, action):
  """Of log-probabilities and of values."""
  now = policy.evaluate(params, obs, action)
  return ((now.value - 3) ** 2).mean() - now.logp.mean() / action.shape[1]


def one(dtype):
  return openvla_policy.policy(model(dtype), STATS)


CASES = {
  'openvla': (one, 1, A),
  'film': (functools.partial(oft, film=True), 2, Z * A),
  'adapters': (adapted, 2, Z * A),
}
# The state is one token of a row. What reaches its projector through attention
# is rounded by more than 1 %, in sums over so few tokens.
FIXED = {'openvla': (), 'film': (), 'adapters': (base.FROZEN, HEAD)}


def gradients(loss, params, *data):
  """Those of `loss(dtype, params, *data)`, in float32 and in bfloat16."""
  want, got = (
    jax.device_get(jax.jit(jax.grad(functools.partial(loss, x)))(params, *data))
    for x in ('float32', 'bfloat16')
  )
  for tree in want, got:
    for tower in {'dino', 'siglip'} & {*tree}:
      # A bias of all keys changes no attention weight.
      del tree[tower]['layers']['key_bias_HW']
  return want, got


def test_gradients_of_towers_and_film_are_near_those_of_float32():
  rng = np.random.default_rng(0)
  params = parameters(rng, oft('float32', film=True))
  params = {k: params[k] for k in ('dino', 'siglip', 'projector', 'film')}
  image, mean = observation(rng, 1).image[:ROWS], draw(rng, ROWS, D)
  # Of patches that agree: sums in bfloat16 stop growing.
  cotangent = 1 + draw(rng, ROWS, (SIZE // PATCH) ** 2, D)

  def loss(dtype, params, image, mean, cotangent):
    own = model(dtype)
    films = film.films(own, params['film'], mean)
    x = openvla.embed_patches(own, params, image, films)
    return (x.astype('float32') * cotangent).sum()

  bfloat16.check(*gradients(loss, params, image, mean, cotangent))


def test_gradients_of_heads_are_near_those_of_float32():
  rng = np.random.default_rng(0)
  params = parameters(rng, oft('float32', head='l1'))
  params = {k: params[k] for k in ('llama', 'state_projector', 'l1_head')}
  llama = params.pop('llama')
  params['llama'] = {k: llama[k] for k in ('norm_D', 'unembed_DV')}
  params[base.CRITIC] = {'value_D': draw(rng, D) / 4}
  # States of all rows have something in common, as those of a model have.
  x = draw(rng, 1, 1, D) + draw(rng, ROWS, CHUNK * A, D)
  # All actions lie above those of the head.
  ahead = 4 + draw(rng, ROWS, CHUNK * A)
  data = x, 1 + draw(rng, ROWS, CHUNK, O), ahead, tokens(rng, ROWS, CHUNK * A)
  cotangent = 1 + draw(rng, ROWS, CHUNK, D)

  def loss(dtype, params, x, state, ahead, token, cotangent):
    config = openvla_oft.Config(model(dtype), CHUNK, A, O, head='l1')
    x, own = x.astype(dtype), config.openvla
    l1 = jnp.abs(openvla_oft.regress(config, params, x) - ahead)
    logit = openvla.action_logits(own, params, x)
    logp = sample.logp(logit, token - own.tokens.start)
    value = openvla.values(own, params, x[:, :1])
    seen = openvla_oft.heads(config)['state_projector'].apply(
      {'params': params['state_projector']}, state.astype(dtype)
    )
    return (
      l1.mean()
      - logp.mean()
      + ((value - 3) ** 2).mean()
      + (seen.astype('float32') * cotangent).mean()
    )

  bfloat16.check(*gradients(loss, params, *data, cotangent))


@pytest.mark.claims
@pytest.mark.parametrize('case', CASES)
def test_gradients_of_all_leaves_are_near_those_of_float32(case):
  make, cameras, numbers = CASES[case]
  rng = np.random.default_rng(0)
  params = parameters(rng, make('float32'))
  data = observation(rng, cameras), tokens(rng, B, numbers)
  fixed = {k: params.pop(k) for k in FIXED[case]}

  def of(dtype, params, fixed, obs, action):
    return reinforcement(make(dtype), params | fixed, obs, action)

  bfloat16.check(*gradients(of, params, fixed, *data))
