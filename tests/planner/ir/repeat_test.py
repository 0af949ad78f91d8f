"""Recorded loops: one call with a body, and which bodies are refused."""

import jax.numpy as jnp
import pytest

import stages
from stages import repeat
from tests.planner import loops

pytestmark = pytest.mark.usefixtures('in_float64')


def test_a_repeat_is_recorded_as_one_call_with_a_body():
  flow = loops.trace()
  assert [node.name for node in flow.nodes] == [
    'zero', 'grow', 'loop', 'halve', 'weigh'
  ]  # fmt: skip
  (loop,) = [node for node in flow.nodes if node.body]
  names = [node.name for node in loop.body.nodes]
  assert names == ['halve', 'weigh', 'grow', 'count']
  # A plan places the stages of the body, not the loop.
  assert flow.stages == ('zero', 'grow', 'halve', 'weigh', 'count')
  listing = str(flow)
  assert '≤ 5 rounds' in listing and '\n  halve ' in listing


REFUSED = {
  'no stage': (lambda x: (x, None), 'body of loop calls no stage'),
  'no boolean': (
    lambda x: (loops.halve(x[0]), x[1]),
    'one boolean that a stage',
  ),
  'two': (lambda x: (x, (loops.count(x[1], x[1]))), 'one boolean that a stage'),
  'another carry': (
    lambda x: (loops.halve(x[0]), None),
    'a state like the one',
  ),
  'twice': (
    lambda x: ((halved := loops.halve(x[0]), halved), None),
    'returns halve. more than once, state.0 being one of them',
  ),
}


@pytest.mark.parametrize('fn, message', REFUSED.values(), ids=REFUSED)
def test_a_body_whose_output_cannot_be_its_next_input_is_refused(fn, message):
  given = jnp.ones(2), jnp.ones(2)
  if fn is REFUSED['no boolean'][0]:
    fn, given = (lambda x: ((loops.halve(x[0]), x[1]), x[1])), given
  if fn is REFUSED['two'][0]:
    given = jnp.ones(2), jnp.int32(1)
  with pytest.raises(TypeError, match=message) as error:
    loops.trace(loops.body(fn), given=given)
  assert any('in stage loop, while' in note for note in error.value.__notes__)


def test_a_body_that_returns_an_input_as_its_carry_is_refused():
  loop = repeat.Repeat(lambda x, y: ((loops.halve(x[0]), y), None), 'loop', 2)
  with pytest.raises(TypeError, match='what it was given as state.1'):
    loops.trace(lambda s, x: (s, loop((x, x), x)), given=jnp.ones(2))


def test_a_body_that_reads_an_enclosing_value_is_refused():
  def reaching(state, x):
    loop = repeat.Repeat(lambda y: (loops.grow(y, state), None), 'loop', 2)
    return state, loop(x)

  with pytest.raises(TypeError, match='another recording'):
    loops.trace(reaching, given=jnp.ones(2))


@stages.stage('move', consumes=(0,))
def move(token, x):
  return token + x


def test_a_loop_carries_a_token_and_consumes_it():
  loop = repeat.Repeat(lambda t, x: (move(t, x), None), 'loop', 2)
  flow = loops.trace(lambda t, x: (loop(t, x), ()), jnp.ones(4), jnp.ones(4))
  (node,) = flow.nodes
  assert node.consumes == {node.reads[0]}
  with pytest.raises(TypeError, match='loop has used up'):
    loops.trace(
      lambda t, x: (loop(t, x), loops.halve(t)), jnp.ones(4), jnp.ones(4)
    )
  again = repeat.Repeat(lambda x, t: (move(t, x), None), 'loop', 2)
  with pytest.raises(TypeError, match='uses up input.0 in every round'):
    loops.trace(lambda t, x: (t, again(x, t)), jnp.ones(4), jnp.ones(4))
