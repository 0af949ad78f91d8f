"""A consumed value is read once, in pieces and on places too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from planner.lower import passes, program
from rlinf_jax.runtime import local
import stages

KEY = jax.random.key(0)
ROWS, HORIZON = 8, 3


@stages.stage('move', consumes=(0,))
def move(token, action):
  return token + action


@stages.stage('look')
def look(token):
  return 2 * token


@stages.stage('pair', consumes=(0,))
def pair(token, other):
  return token, other


TOKEN = jnp.arange(8.0)


def trace(step):
  return flow_lib.trace(step, TOKEN, TOKEN)


REFUSED = {
  'after it was used up': (
    lambda t, x: (move(t, x), look(t)),
    'look was given state., which stage move has used up: read what that',
  ),
  'twice': (
    lambda t, x: (move(t, x), move(t, x)),
    'move was given state., which stage move has used up',
  ),
  'before it is used up': (
    lambda t, x: (move(t, look(t)), x),
    'move uses up state., which stage look reads too. .* read once',
  ),
  'twice in a call': (
    lambda t, x: (pair(t, t)[0], x),
    'pair uses up state., which stage pair reads too',
  ),
  'returned': (
    lambda t, x: (t, move(t, x)),
    'returns state., which stage move has used up',
  ),
  'kept twice': (
    lambda t, x: ((moved := move(t, x)), moved),
    'returns move. more than once, and its next call will use it up as state.',
  ),
}


@pytest.mark.parametrize('step, message', REFUSED.values(), ids=REFUSED)
def test_a_second_use_of_a_consumed_value_is_refused(step, message):
  with pytest.raises(TypeError, match=message):
    trace(step)


def test_a_value_that_is_replaced_may_be_consumed_again():
  flow = trace(lambda t, x: (move(move(t, x), x), x))
  used = [v for node in flow.nodes for v in node.consumes]
  assert len(set(used)) == 2


def test_consuming_an_unbatched_argument_is_refused():
  with pytest.raises(ValueError, match=r'unbatched arguments \[1\].* rows'):
    stages.Stage(lambda x, t: x, 'move', consumes=(1,), unbatched=(1,))
  stages.Stage(lambda x, t: x, 'move', 'batch', consumes=(1,), unbatched=(1,))


def test_lowering_donates_consumed_values_but_not_the_callers():
  def step(state, x):
    return move(move(x, state), state), ()  # `x` is the caller's.

  flow = trace(step)
  one = plan_lib.one_place(flow.stages)
  runs = [
    op
    for op in passes.lower(flow, one)[1]['all']
    if isinstance(op, program.Run)
  ]
  first, second = flow.nodes
  assert not set(runs[0].donate) & first.consumes
  assert set(runs[1].donate) >= second.consumes


class Env:
  """A simulator outside JAX: where each row is, and how often it was moved."""

  def __init__(self):
    self.at, self.time = np.zeros(ROWS, np.float32), np.zeros(ROWS, int)

  def stage(self):
    def step(token_B2, action_B):
      id_B, time_B = np.asarray(token_B2).T
      np.testing.assert_array_equal(time_B, self.time[id_B])
      self.time[id_B] += 1
      self.at[id_B] += action_B
      token_B2 = np.stack([id_B, self.time[id_B].astype(np.int32)], 1)
      return token_B2, self.at[id_B]

    def like(token_B2, action_B):
      B = token_B2.shape[0]
      return (
        jax.ShapeDtypeStruct((B, 2), jnp.int32),
        jax.ShapeDtypeStruct((B,), jnp.float32),
      )

    return stages.Stage(
      step, 'simulate', consumes=(0,), host=True, out_shapes=like
    )


@stages.stage('act', unbatched=(0,))
def act(w, obs_B):
  return jnp.cos(w + obs_B)


@stages.stage('learn', 'batch')
def learn(w, obs_B):
  return w + 0.1 * obs_B.mean()


def workflow():
  simulate = Env().stage()

  def step(state, obs, key):
    del key
    token, w = state
    for _ in range(HORIZON):
      token, obs = simulate(token, act(w, obs))
    return (token, learn(w, obs)), obs

  return step


def begin():
  id_B = jnp.arange(ROWS, dtype=jnp.int32)
  return jnp.stack([id_B, 0 * id_B], 1), jnp.float32(0.5)


SKETCHES = {
  'one place': {},
  'pieces': {'pieces': 4},
  'two places in pieces': {
    'places': {'x': {'devices': [0]}, 'y': {'devices': [1]}},
    'stages': {'simulate': 'y', '*': 'x'},
    'pieces': 2,
  },
}


@pytest.mark.parametrize('sketch', SKETCHES.values(), ids=SKETCHES)
def test_a_simulator_behind_a_token_is_stepped_in_order(sketch):
  eager, state, obs = workflow(), begin(), np.ones(ROWS, np.float32)
  flow = flow_lib.trace(workflow(), state, obs, KEY)
  runtime = local.LocalRuntime(plan_lib.parse(sketch, flow.stages), step=flow)
  in_memory.start(runtime, state)
  for _ in range(3):
    outputs = runtime.step(obs, KEY)
    state, want = eager(state, obs, KEY)
    np.testing.assert_allclose(outputs, want, rtol=1e-6)
    np.testing.assert_array_equal(in_memory.state(runtime)[0], state[0])
  assert int(state[0][0, 1]) == 3 * HORIZON
  runtime.close()
