"""Arithmetic in bfloat16, compared with float32's on the same numbers."""

import dataclasses
import functools
import math

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from stages import base
from stages.language import language_model
from stages.language.decoding import kv_cache
from stages.models import block as block_lib
from stages.models import transformer
from stages.models.layers import attention, mixed_precision

CONFIG = transformer.Config(V=64, D=32, L=2, H=4, K=2, W=8, F=64)
OFTEN = 5  # A token that is half of all tokens.
N, P, T = 64, 4, 128


def params(config):
  """Random parameters that bfloat16 can represent, biases included.

  Rounding them would change the model, by as much as all else.
  """
  rng = np.random.default_rng(0)

  def draw(path, like):
    mean = 1.0 if path[-1].key.endswith('_D') else 0.0
    x = jnp.asarray(rng.normal(mean, 0.2, like.shape), jnp.bfloat16)
    return x.astype(jnp.float32)

  shapes = transformer.param_shapes(config)
  return jax.tree_util.tree_map_with_path(draw, shapes)


def tokens(rng, rows, columns):
  token = rng.integers(0, CONFIG.V, (rows, columns), np.int32)
  return np.where(rng.random(token.shape) < 0.5, OFTEN, token)


def loss(config, params):
  """Negative log-likelihood of 8,192 tokens."""
  rng = np.random.default_rng(1)
  prompt = base.Prompt(tokens(rng, N, P), np.ones((N, P), np.int32))
  policy = language_model.policy(config, response_length=T)
  return -policy.evaluate(params, prompt, tokens(rng, N, T)).logp.mean()


@functools.cache
def gradient(tied, dtype):
  """Gradients by name, those of scanned layers apart."""
  config = dataclasses.replace(CONFIG, tie_embeddings=tied, dtype=dtype)
  grad = jax.jit(jax.grad(functools.partial(loss, config)))(params(config))
  leaves = {}
  for path, x in jax.tree_util.tree_leaves_with_path(grad):
    name = path[-1].key
    assert x.dtype == jnp.float32, name
    x = np.asarray(x, np.float64)
    if path[0].key == 'layers':
      leaves |= {f'{name} of layer {i}': layer for i, layer in enumerate(x)}
    else:
      leaves[name] = x
  return leaves


def error(got, want):
  return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize('tied', claims.some([True, False], [True]))
def test_gradients_in_bfloat16_are_those_of_float32(tied):
  want, got = gradient(tied, 'float32'), gradient(tied, 'bfloat16')
  errors = {name: error(got[name], want[name]) for name in want}
  # Products of rounded activations and cotangents, 2^-9 each at most and in
  # several layers, leave 0.3 to 0.9 % in every matrix. What sums over tokens in
  # float32 adds nothing to it.
  few = {name: e for name, e in errors.items() if 'key' not in name}
  assert max(few.values()) < 0.01, few
  # But for rotation, adding a vector to all keys changes no attention weight:
  # gradients of keys are the small rest of sums that cancel.
  assert max(errors.values()) < 0.02, errors
  often = [x['embed_VD'][OFTEN] for x in (got, want)]
  assert error(*often) < 0.01


def test_the_backward_pass_keeps_activations_in_bfloat16():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  block = block_lib.Block(config)
  layers = params(config)['layers']
  variables = {'params': jax.tree.map(lambda x: x[0], layers)}
  x_NSD = jnp.zeros((2, 8, config.D), jnp.bfloat16)
  angle_NSR = jnp.zeros((2, 8, config.W // 2))

  def forward(variables, x_NSD):
    mask = attention.Mask(jnp.ones((2, 8), bool))
    context = attention.Context(angle_NSR, angle_NSR, mask)
    return block.apply(variables, x_NSD, None, context, None)[0]

  _, pullback = jax.eval_shape(
    lambda *inputs: jax.vjp(forward, *inputs), variables, x_NSD
  )
  kept = [x for x in jax.tree.leaves(pullback) if x.dtype == jnp.float32]
  wide = [x.shape for x in kept if x.shape[-1:] in [(config.D,), (config.F,)]]
  # Biases and norm scales are parameters and take no more memory.
  assert all(len(shape) == 1 for shape in wide), wide


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'float64'])
def test_a_product_is_summed_in_float32_and_its_cotangents_keep_their_types(
  dtype,
):
  with jax.enable_x64(dtype == 'float64'):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 96, 8)), dtype)
    wide = mixed_precision.wide_dtype(x.dtype)
    weight = jnp.asarray(rng.normal(size=(8, 3, 5)), wide)
    out, pullback = jax.vjp(
      functools.partial(mixed_precision.product, 'BTD,DHW->BTHW'), x, weight
    )
    # Factors are rounded; what follows is compared with exact arithmetic.
    cotangent = jnp.asarray(rng.normal(size=out.shape), dtype).astype(wide)
    x_bar, weight_bar = pullback(cotangent)
    assert (out.dtype, weight_bar.dtype, x_bar.dtype) == (wide, wide, x.dtype)
    exact = [
      np.asarray(factor, np.float64)
      for factor in (x, weight.astype(dtype), cotangent)
    ]
    close = functools.partial(
      np.testing.assert_allclose, rtol=0, atol=float(1e3 * jnp.finfo(wide).eps)
    )
    close(out, np.einsum('BTD,DHW->BTHW', *exact[:2]))
    close(weight_bar, np.einsum('BTD,BTHW->DHW', exact[0], exact[2]))
    want = np.einsum('BTHW,DHW->BTD', exact[2], exact[1])
    np.testing.assert_allclose(
      x_bar.astype(wide), want, rtol=2**-8, atol=1e-4 * np.abs(want).max()
    )


def gelu(x):
  """The exact GELU and its slope."""
  normal = np.array([0.5 * math.erfc(-v * 0.5**0.5) for v in x])
  density = np.exp(-np.square(x) / 2) / (2 * np.pi) ** 0.5
  return x * normal, normal + x * density


def gelu_tanh(x):
  """The approximation by tanh, and its slope."""
  root = (2 / np.pi) ** 0.5
  tanh = np.tanh(root * (x + 0.044715 * x**3))
  slope = root * (1 + 3 * 0.044715 * x**2)
  return x * (1 + tanh) / 2, (1 + tanh + x * (1 - tanh**2) * slope) / 2


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
# XLA approximates tanh to 1e-6, which is multiplied by up to 6.
@pytest.mark.parametrize('exact, atol', [(gelu, 1e-6), (gelu_tanh, 1e-5)])
def test_gelu_is_rounded_once_and_keeps_its_input_alone(exact, atol, dtype):
  x = jnp.linspace(-6.0, 6.0, 241).astype(dtype)
  run = getattr(mixed_precision, exact.__name__)
  y, pullback = jax.vjp(run, x)
  assert y.dtype == x.dtype
  if dtype == 'bfloat16':
    assert {v.dtype for v in jax.tree.leaves(pullback)} == {x.dtype}
  (got,) = pullback(jnp.ones_like(y))
  wants = exact(np.array([float(v) for v in x]))
  tolerance = {'rtol': float(jnp.finfo(dtype).eps), 'atol': atol}
  for mine, want in zip((y, got), wants, strict=True):
    np.testing.assert_allclose(np.asarray(mine, np.float64), want, **tolerance)


def test_logits_in_bfloat16_are_not_rounded():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  weights = params(config)
  rng = np.random.default_rng(0)
  x_BTD = jnp.asarray(rng.normal(size=(2, 3, config.D)), jnp.bfloat16)
  got = transformer.Transformer(config).apply(
    {'params': weights}, x_BTD, method='logits'
  )
  normal = mixed_precision.rms_norm(
    x_BTD, weights['norm_D'], config.norm_epsilon
  )
  want = np.asarray(normal, np.float64) @ np.asarray(weights['embed_VD']).T
  assert got.dtype == jnp.float32
  # Rounding to bfloat16 would be up to 0.03 off.
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_attention_scores_of_decoding_are_not_rounded():
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

  # Scores of some ±60: bfloat16 would be up to 0.1 off.
  q_B1HW, past_BT = 20 * draw(4, 1, 4, 8), jnp.ones((4, 5), bool)
  cache = kv_cache.LayerCache(draw(4, 2, 5, 8), draw(4, 2, 5, 8))
  key_NKPW, value_NKPW = draw(2, 2, 6, 8), draw(2, 2, 6, 8)
  mask_NP = jnp.ones((2, 6))
  got = kv_cache.attention(
    CONFIG, q_B1HW, cache, key_NKPW, value_NKPW, mask_NP, past_BT
  )
  wide = lambda x: x.astype(jnp.float32)
  want = kv_cache.attention(
    CONFIG,
    wide(q_B1HW),
    jax.tree.map(wide, cache),
    wide(key_NKPW),
    wide(value_NKPW),
    mask_NP,
    past_BT,
  )
  assert got.dtype == jnp.bfloat16
  # Weights, values and result are rounded to eight bits each.
  assert error(wide(got), want) < 2**-8


# A vocabulary that no other matrix has.
CHUNKED = dataclasses.replace(CONFIG, V=96, dtype='bfloat16')


def scored(config, chunks):
  """Log-probabilities and their gradient, computed in chunks of time."""
  rng = np.random.default_rng(2)
  prompt = base.Prompt(tokens(rng, 4, P), np.ones((4, P), np.int32))
  action_BT = tokens(rng, 4, T)
  policy = language_model.policy(
    config, response_length=T, max_live_logits=4 * config.V * T // chunks
  )

  def loss_of(params):
    logp_BT = policy.evaluate(params, prompt, action_BT).logp
    return logp_BT.mean(), logp_BT

  return jax.value_and_grad(loss_of, has_aux=True)


@pytest.mark.parametrize('tied', [False, True])
def test_a_matrix_that_is_rounded_once_has_the_gradient_of_all_chunks(tied):
  config = dataclasses.replace(CHUNKED, tie_embeddings=tied)
  (_, want), want_grad = jax.jit(scored(config, 1))(params(config))
  (_, got), grad = jax.jit(scored(config, 8))(params(config))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # A sum over tokens, in float32, adds up in another order.
  name = transformer.output_names(config)[1]
  np.testing.assert_allclose(grad[name], want_grad[name], rtol=1e-4, atol=1e-7)


def roundings(jaxpr, shape, within=False):
  """Counts the conversions of arrays of a shape in loops."""
  found = 0
  for eqn in jaxpr.eqns:
    is_loop = within or eqn.primitive.name == 'scan'
    if eqn.primitive.name == 'convert_element_type':
      found += within and eqn.invars[0].aval.shape == shape
    for inner in core.jaxprs_in_params(eqn.params):
      found += roundings(inner, shape, is_loop)
  return found


def test_no_chunk_rounds_the_output_matrix_again():
  config = dataclasses.replace(CHUNKED, tie_embeddings=False)
  jaxpr = jax.make_jaxpr(scored(config, 8))(params(config)).jaxpr
  assert roundings(jaxpr, (config.D, config.F))  # Those of layers are found.
  assert not roundings(jaxpr, (config.D, config.V))
