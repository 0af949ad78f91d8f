"""Scores of attention among the arrays of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

import compile_tiny
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.planning.compiled import hlo, large_arrays
import stages
from stages.models.layers import attention

PROMPT, COMPLETION, HEADS, WIDTH = 16, 24, 4, 8


def scores(shapes, lengths, widths=(), op_name='jit(f)/add'):
  """Those of a program that writes arrays of some shapes."""
  lines = [
    f'  %x{i} = f32[{shape}] add(%p, %p), metadata={{op_name="{op_name}"}}'
    for i, shape in enumerate(shapes)
  ]
  text = '\n'.join(['ENTRY %main (p: f32[]) -> f32[] {', *lines, '}'])
  found = large_arrays.attention_scores(hlo.parse(text), lengths, widths)
  return found and str(found.array)


def test_scores_have_two_dimensions_of_tokens():
  pairs = '2,4,24,40'  # A completion sees its prompt and itself.
  others = ['2,24,512', '2,4,1,40']
  assert scores([*others, pairs], [PROMPT, COMPLETION]) == f'f32[{pairs}]'
  assert scores(others, [PROMPT]) is None


def test_where_a_width_is_a_length_scores_are_what_attention_computes():
  shapes, lengths = ['40,40', '2,24,40'], [PROMPT, COMPLETION]
  assert scores(shapes, lengths) == 'f32[2,24,40]'
  assert scores(shapes, lengths, {40}) is None
  # Two other lengths are beyond doubt.
  assert scores(['2,24,16'], lengths, {40}) == 'f32[2,24,16]'
  for name in ('f/attention/dot', 'f/transpose(jvp(attention))/dot'):
    assert scores(shapes, lengths, {40}, name) == 'f32[2,24,40]'
  assert scores(shapes, lengths, {40}, 'f/attentional/dot') is None


def test_a_fusion_computes_the_scores_of_attention_inside():
  text = """HloModule m

%fused (a: f32[2,40,40]) -> f32[3,2,40,40] {
  %a = f32[2,40,40] parameter(0)
  %e = f32[2,40,40] exponential(%a), metadata={op_name="f/attention/exp"}
  ROOT %b = f32[3,2,40,40] broadcast(%e), dimensions={1,2,3}
}

ENTRY %main (a: f32[2,40,40]) -> f32[3,2,40,40] {
  %a = f32[2,40,40] parameter(0)
  ROOT %stack = f32[3,2,40,40] fusion(%a), kind=kLoop, calls=%fused
}
"""
  found = large_arrays.attention_scores(hlo.parse(text), [40], {40})
  assert str(found.array) == 'f32[3,2,40,40]'
  text = text.replace('attention', 'feedforward')
  assert large_arrays.attention_scores(hlo.parse(text), [40], {40}) is None


def compiled(length: int, max_live_scores: int):
  """The gradient of a layer of attention, 32 wide, as a plan compiles it."""

  @stages.stage('gradient', 'sum', unbatched=(0,))
  def gradient(params, token_BT):
    B, T = token_BT.shape

    def loss(params):
      x_BTD = jnp.tanh(params['embedding_VD'][token_BT])
      x_BTHW = (x_BTD @ params['in_DE']).reshape(B, T, HEADS, WIDTH)
      mask = attention.Mask(jnp.ones((B, T), bool))
      y_BTHW = attention.attention(
        *(3 * [x_BTHW]), mask, max_live_scores=max_live_scores
      )
      y_BTD = jnp.tanh(y_BTHW.reshape(B, T, -1) @ params['out_ED'])
      return jnp.sum(jnp.sin(x_BTD + y_BTD))

    return jax.grad(loss)(params)

  D = HEADS * WIDTH
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in (
      ('embedding_VD', (11, D)),
      ('in_DE', (D, D)),
      ('out_ED', (D, D)),
    )
  }
  token_BT = jax.ShapeDtypeStruct((2, length), jnp.int32)
  flow = flow_lib.trace(
    lambda params, token_BT: (gradient(params, token_BT), ()), params, token_BT
  )
  plan = plan_lib.one_place(flow.stages, plan_lib.Placement())
  (stage,) = compile_tiny.compiler(flow, jax.devices()).compile(plan).stages
  return stage.executable.scores


@pytest.mark.parametrize('length', [32, 48])
def test_a_model_as_wide_as_its_rows_are_long_materializes_only_scores(length):
  """Of 32 or 48 tokens, all queries attend at once, or eight at a time."""
  pairs = 2 * HEADS * length
  found = compiled(length, pairs * length)
  assert found.array.shape.count(length) >= 2
  # Not a matrix, and not the activations of rows.
  assert found.array.bytes >= 4 * pairs * length
  assert compiled(length, pairs * 8) is None
