"""Gradients of adapters and of value heads in bfloat16, against float32's.

Weights are numbers of bfloat16, so that arithmetic alone differs. Those of a
language model alone are in `tests/stages/models/bfloat16_test.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bfloat16
import claims
from stages import base
from stages.language import language_model, value_model
from stages.models import lora, transformer

# 2,048 tokens of completions.
N, GROUP, P, T, V, D = 64, 8, 4, 32, 64, 32
OFTEN = 5  # A token that is half of all tokens: gradients of tokens agree.
PACKED = 512  # Room of two groups' completions.
ALPHA = 4.0


def config(dtype):
  return transformer.Config(
    V=V, D=D, L=2, H=4, K=2, W=8, F=48, tie_embeddings=False, dtype=dtype
  )


def draw(rng, *shape):
  return jnp.asarray(rng.normal(size=shape), 'bfloat16').astype('float32')


def parameters(rng, shapes):
  """Scales around one, all others around zero, embeddings of size one."""

  def leaf(path, x):
    name = path[-1].key
    is_scale = 'norm' in name or 'before' in name
    size = 1 if name == 'embed_VD' else 6
    return is_scale + draw(rng, *x.shape) / size

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def batch(rng):
  """Prompts, completions, and a mask of lengths from half to all tokens."""
  token = jnp.asarray(rng.integers(0, V, (N // GROUP, P), np.int32))
  prompt = base.Prompt(token, jnp.ones_like(token))
  action = rng.integers(0, V, (N, T), np.int32)
  action = np.where(rng.random(action.shape) < 0.5, OFTEN, action)
  mask = np.arange(T)[None] < rng.integers(T // 2, T + 1, (N, 1))
  prompt = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), prompt)
  return prompt, jnp.asarray(action), jnp.asarray(mask, 'float32')


def far(value, mask):
  """Squared errors of values that lie below all returns."""
  return (mask * (value - 3.0) ** 2).sum() / mask.sum()


def adapters(quantize, packed_tokens, rng):
  """Adapters and the critic on their trunk; the trunk is frozen."""
  settings = lora.Lora(rank=4, alpha=ALPHA, quantize=quantize)
  frozen = parameters(rng, transformer.param_shapes(config('float32')))
  shapes = jax.eval_shape(
    lambda: lora.init(frozen, settings, jax.random.key(0))
  )
  params = {
    lora.ADAPTER: parameters(rng, shapes),
    base.CRITIC: {'value_D': draw(rng, D) / 6},
  }
  own = {
    lora.PARAMS: lora.quantized(frozen, settings),
    lora.ALPHA: jnp.float32(ALPHA),
  }

  def loss(dtype, params, own, prompt, action, mask):
    policy = language_model.policy(
      config(dtype), response_length=T, packed_tokens=packed_tokens
    )
    policy = lora.wrap(policy, settings)
    now = policy.evaluate(
      params | {base.FROZEN: own}, prompt, action, group_size=GROUP, mask=mask
    )
    return far(now.value, mask) - (mask * now.logp).sum() / mask.sum()

  return loss, params, own


def own_trunk(packed_tokens, rng):
  """A critic with its own trunk, and its scores of whole completions."""
  shapes = value_model.own_trunk(config('float32')).init
  params = parameters(rng, jax.eval_shape(shapes, jax.random.key(0)))

  def loss(dtype, params, own, prompt, action, mask):
    del own
    model = value_model.own_trunk(config(dtype), packed_tokens=packed_tokens)
    value = model.value(params, prompt, action, group_size=GROUP, mask=mask)
    score = value_model.score_completions(model)(params, prompt, action, mask)
    return far(value, mask) + jax.nn.softplus(3.0 - score).mean()

  return loss, params, ()


CASES = {
  'adapters': functools.partial(adapters, None, None),
  'adapters_packed': functools.partial(adapters, None, PACKED),
  'adapters_int8': functools.partial(adapters, 'int8', None),
  'adapters_nf4': functools.partial(adapters, 'nf4', None),
  'own_trunk': functools.partial(own_trunk, None),
  'own_trunk_packed': functools.partial(own_trunk, PACKED),
}


@pytest.mark.parametrize('case', claims.some(CASES, ('adapters',)))
def test_gradients_of_all_leaves_are_near_those_of_float32(case):
  rng = np.random.default_rng(0)
  loss, params, own = CASES[case](rng)
  data = own, *batch(rng)
  want, got = (
    jax.device_get(jax.jit(jax.grad(functools.partial(loss, x)))(params, *data))
    for x in ('float32', 'bfloat16')
  )
  bfloat16.check(want, got)
