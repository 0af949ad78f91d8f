"""Which implementation of attention is chosen; none changes a result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from sharding import mesh as mesh_lib
import stages
from stages import kernels, workflows
from stages.language import language_model
from stages.models import transformer
from stages.models.layers import attention, cudnn
from tests.rlinf_jax.runtime.plans import invariance_test
import tiny

T = 128


@functools.cache
def grpo(implementation):
  config = dataclasses.replace(tiny.CONFIG, attention=implementation)
  policy = language_model.policy(config, response_length=tiny.LENGTH, stop=(0,))
  return workflows.grpo(
    policy,
    invariance_test.even,
    invariance_test.KEEP,
    group_size=invariance_test.GROUP,
    kl_coef=1.0,
  )


@pytest.mark.parametrize(
  ('implementation', 'place'),
  [
    ('splash', 'mixed'),
    pytest.param('splash', 'one', marks=pytest.mark.claims),
    pytest.param('cudnn', 'mixed', marks=pytest.mark.claims),
  ],
)
def test_a_kernel_changes_no_gradient_of_grpo(implementation, place):
  batch, key = tiny.problem(rows=8, columns=6), jax.random.key(3)
  state = invariance_test.begin(grpo('chunked'))
  want = grpo('chunked').step(state, batch, key)
  workflow = grpo(implementation)
  got = invariance_test.planned(workflow, state, batch, key, place, {})
  invariance_test.same(got, want, 1e-5)


def chosen(
  platform,
  axes=None,
  mask=attention.Mask,
  heads=(4, 2),
  dtype=jnp.float32,
  **settings,
):
  """The choice for rows of 128 tokens on a platform that is not here.

  `mask` is None for attention without one.
  """
  H, K = heads
  shapes = [(4, T, n, 16) for n in (H, K, K)]
  arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  is_key_BC = jax.ShapeDtypeStruct((4, T), jnp.bool_)
  found = {}

  def run(q, k, v, is_key_BC):
    if mask is None:
      return attention.bidirectional(q, k, v)
    return attention.attention(q, k, v, mask(is_key_BC), **settings)

  with jax.sharding.use_abstract_mesh(mesh_lib.abstract(axes or {}, platform)):
    jax.eval_shape(kernels.recorded(run, found), *arrays, is_key_BC)
  assert [*found] == [platform]
  (choice,) = found[platform]
  return choice


def bidirectional(is_key_BC):
  return attention.Mask(is_key_BC, attention.Bidirectional())


@pytest.mark.parametrize('mask', [attention.Mask, bidirectional, None])
def test_a_gpu_gets_cudnn_where_the_type_and_the_machine_allow_it(mask):
  wrong = 'it computes in float32, and cuDNN in bfloat16'
  assert chosen('gpu', mask=mask) == kernels.Choice('chunked', wrong)
  found = chosen('gpu', mask=mask, dtype=jnp.bfloat16)
  if cudnn.is_here():
    assert found == kernels.Choice('cudnn')
  else:
    why = 'JAX finds no cuDNN on this machine'
    assert found == kernels.Choice('chunked', why)


def test_a_tpu_gets_its_kernel_and_other_hardware_chunks():
  assert chosen('tpu') == kernels.Choice('splash')
  assert chosen('tpu', {'fsdp': 2, 'tensor': 2}) == kernels.Choice('splash')
  assert chosen('cpu') == kernels.Choice('chunked')
  assert chosen('tpu', implementation='chunked') == kernels.Choice('chunked')
  assert chosen('cpu', implementation='splash') == kernels.Choice('splash')


def windowed(is_key_BC):
  position_BC = jnp.zeros(is_key_BC.shape, jnp.int32)
  return attention.causal(is_key_BC, 3, position_BC, position_BC)


def shared(is_key_BC):
  number_BC = jnp.zeros(is_key_BC.shape, jnp.int32)
  segment = attention.Segment(number_BC, number_BC)
  mask = attention.Mask(is_key_BC)
  return mask._replace(segment_BT=segment, segment_BC=segment)


def blocks(is_key_BC):
  number_BC = jnp.zeros(is_key_BC.shape, jnp.int32)
  return attention.Mask(is_key_BC, attention.Blocks(number_BC, number_BC))


@pytest.mark.parametrize(
  ('why', 'kwargs'),
  [
    ('queries attend to all keys', {'mask': bidirectional}),
    ('queries attend to later keys of their block', {'mask': blocks}),
    ('some layers have a sliding window', {'mask': windowed}),
    ('completions in a packed row share a prompt', {'mask': shared}),
    (
      'devices cannot share 3 key-value heads',
      {
        'heads': (6, 3),
        'axes': {'tensor': 2},
      },
    ),
  ],
)
def test_what_the_kernel_cannot_compute_is_said_and_computed_in_chunks(
  why, kwargs
):
  choice = chosen('tpu', **kwargs)
  assert choice.name == 'chunked'
  assert choice.why.startswith(why)
  with pytest.raises(ValueError, match=f'splash.* cannot compute .*{why}'):
    chosen('tpu', implementation='splash', **kwargs)


def test_an_unknown_implementation_is_refused_at_the_door():
  with pytest.raises(ValueError, match="attention 'flash' is not one of"):
    dataclasses.replace(tiny.CONFIG, attention='flash')


def test_a_stage_knows_what_computes_its_attention():
  config = dataclasses.replace(tiny.CONFIG, attention='chunked')
  model = transformer.Transformer(config)

  @stages.stage('score')
  def score(params, token):
    return model.apply({'params': params}, token, jnp.ones_like(token))

  token = jax.ShapeDtypeStruct((2, T), jnp.int32)
  score.shapes(transformer.param_shapes(config), token)
  choice = kernels.Choice('chunked')
  assert score.attention == {'cpu': {choice}}
  assert kernels.describe({'score': {choice}, 'other': set()}) == (
    'chunked in score'
  )
