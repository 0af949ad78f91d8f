"""Loops that a runtime executes equal the eager ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import base, local
import stages
from stages import repeat
from tests.planner import loops

TOLERANCE = {'rtol': 1e-9, 'atol': 1e-9}  # In float64: sines enlarge rounding.


pytestmark = pytest.mark.usefixtures('in_float64')


def runtime_of(flow, plan, state):
  runtime = local.LocalRuntime(plan, step=flow)
  in_memory.start(runtime, state)
  return runtime


@pytest.mark.parametrize('seed', range(6))
def test_random_loops_planned_are_eager(seed):
  fn, flow, plan, state, batch = loops.random_case(seed)
  runtime = runtime_of(flow, plan, state)
  same = functools.partial(
    np.testing.assert_allclose, **TOLERANCE
  ) if plan.pieces > 1 else np.testing.assert_array_equal  # fmt: skip
  results = []
  for most in (2, 1, 3):
    most = jnp.int32(most)
    got = runtime.step(batch, most)
    state, want = fn(state, batch, most)
    jax.tree.map(same, in_memory.state(runtime), state)
    results.append((got, want))
  for got, want in results:  # Later steps have not overwritten results.
    jax.tree.map(same, got, want)
  runtime.close()


SKETCHES = {
  'one place': {},
  'one place per stage': {
    'places': {p: {'devices': [i]} for i, p in enumerate('abcde')},
    'stages': dict(
      zip(('zero', 'grow', 'halve', 'weigh', 'count'), 'abcde', strict=True)
    ),
  },
  'one shared device': {
    'places': {p: {'devices': [0]} for p in 'abcde'},
    'stages': dict(
      zip(('zero', 'grow', 'halve', 'weigh', 'count'), 'abcde', strict=True)
    ),
    'shared_devices': [*'cabed'],
  },
  'meshes': {
    'places': {
      'a': {'devices': [0, 1], 'axes': [['data', 2]]},
      'b': {'devices': [2, 3, 4, 5], 'axes': [['data', 4]]},
    },
    'stages': {'halve': 'b', '*': 'a'},
    'pieces': 2,
  },
}


@pytest.mark.parametrize('sketch', SKETCHES.values(), ids=SKETCHES)
def test_a_loop_ends_in_the_same_round_on_every_place(sketch):
  flow, state = loops.trace(), jnp.ones(())
  runtime = runtime_of(flow, plan_lib.parse(sketch, flow.stages), state)
  for most in (3, 1, 7, 2):
    n = runtime.step(*loops.inputs(most))
    state, want = loops.step(state, loops.inputs(most))
    assert n == want == min(most, 5)
    np.testing.assert_allclose(in_memory.state(runtime), state, rtol=1e-6)
    runs = [s for s in runtime.timeline.take() if s.stage == 'count']
    assert len(runs) == want
  runtime.close()


@pytest.mark.parametrize('given', [True, False])
def test_a_boolean_that_a_loop_is_given_ends_it_on_every_place(given):
  def body(carry, done):
    n, x_B = carry
    n, _ = loops.count(n, n)
    return (n, loops.halve(x_B)), done

  loop = repeat.Repeat(body, 'loop', at_most=3)

  def step(state, inputs):
    x_B, done = inputs
    return state, loop((loops.zero(state), x_B), done)

  state, inputs = jnp.int32(1), (jnp.arange(8.0), jnp.bool_(given))
  flow = loops.trace(step, state, inputs)
  sketch = SKETCHES['one place per stage']
  sketch = sketch | {'stages': {'count': 'a', 'halve': 'b', '*': 'c'}}
  runtime = runtime_of(flow, plan_lib.parse(sketch, flow.stages), state)
  n, x_B = runtime.step(*inputs)
  assert n == (1 if given else 3)
  np.testing.assert_array_equal(x_B, inputs[0] / 2 ** int(n))
  runtime.close()


def test_an_error_in_a_loop_names_the_round():
  def twice(n):
    if n > 1:
      raise LookupError('it is away')
    return n + 1

  like = jax.ShapeDtypeStruct((), jnp.int32)
  fails = stages.Stage(
    twice, 'more', 'batch', host=True, out_shapes=lambda n: like
  )
  loop = repeat.Repeat(lambda n: (fails(n), None), 'loop', at_most=4)
  flow = loops.trace(lambda n, x: (loop(n), ()), jnp.int32(0), ())
  runtime = runtime_of(flow, plan_lib.one_place(flow.stages), jnp.int32(0))
  with pytest.raises(base.StageError, match='step 1, round 3 of loop: it is'):
    runtime.step((), ())
  runtime.close()
