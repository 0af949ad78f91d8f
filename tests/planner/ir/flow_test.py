import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner.ir import flow
import stages
from stages import workflows
import tiny

STATE = {'w': jnp.zeros(3)}
BATCH = jnp.zeros((8, 2))


@stages.stage('double')
def double(x):
  return 2 * x


@stages.stage('shorten', 'batch')
def shorten(state):
  return {'w': state['w'][:2]}


@stages.stage('round', 'batch')
def as_integer(state):
  return {'w': state['w'].astype(jnp.int32)}


def trace(step, state=STATE, batch=BATCH):
  return flow.trace(step, state, batch)


@functools.cache
def grpo(**kwargs):
  return workflows.grpo(
    tiny.policy(), tiny.even, optax.sgd(1.0), group_size=4, **kwargs
  )


def names(graph):
  return [node.name for node in graph.nodes]


def test_grpo_is_recorded_call_by_call():
  graph = tiny.trace(grpo(kl_coef=0.1, num_minibatches=2), tiny.problem())
  assert names(graph)[:2] == ['repeat', 'keys']
  assert sorted(names(graph)[2:7]) == sorted(
    ['generate', 'reward', 'measure', 'group_advantage', 'ref_logp']
  )
  assert names(graph)[7:] == [
    'minibatches', 'gradient', 'apply', 'gradient', 'apply', 'merge_info'
  ]  # fmt: skip
  assert graph.stages == tuple(dict.fromkeys(names(graph)))


def test_without_a_kl_term_grpo_carries_no_reference():
  plain, with_kl = (
    tiny.trace(grpo(kl_coef=kl), tiny.problem()) for kl in (0.0, 0.1)
  )
  assert 'ref_logp' not in plain.stages
  assert 'ref_logp' in with_kl.stages
  params = jax.eval_shape(tiny.policy().init, jax.random.key(0))
  assert len(with_kl.carry) - len(plain.carry) == len(jax.tree.leaves(params))


def test_sft_is_recorded_call_by_call():
  sft = workflows.sft(tiny.policy(), tiny.even, optax.sgd(1.0))
  graph = tiny.trace(sft, tiny.examples())
  assert names(graph) == ['gradient', 'apply', 'padding']


def test_an_evaluation_carries_the_state_unchanged():
  sft = workflows.sft(tiny.policy(), tiny.even, optax.sgd(1.0))
  graph = tiny.trace_evaluation(sft, tiny.problem())
  assert names(graph) == ['keys', 'answer', 'reward', 'score']
  assert all(start == end for start, end in graph.carry)


def test_a_flow_has_the_shapes_and_types_of_eager_outputs():
  workflow = grpo(kl_coef=0.1)
  graph = tiny.trace(workflow, tiny.problem())
  key = jax.random.key(0)
  _, info = jax.eval_shape(
    workflow.step, workflow.init(key), tiny.problem(), key
  )
  values = [graph.values[v] for v in graph.outputs]
  recorded = jax.tree.unflatten(
    graph.out_tree, [(v.shape, v.dtype) for v in values]
  )
  assert recorded == jax.tree.map(lambda x: (x.shape, x.dtype), info)


def test_every_value_is_written_once_before_it_is_read():
  graph = tiny.trace(grpo(kl_coef=0.1, num_minibatches=2), tiny.problem())
  written = {start for start, _ in graph.carry} | set(graph.inputs)
  for node in graph.nodes:
    assert written.issuperset(node.reads), node.name
    assert written.isdisjoint(node.writes), node.name
    written |= set(node.writes)
  assert written.issuperset(
    {end for _, end in graph.carry} | set(graph.outputs)
  )


def test_rows_have_the_letter_of_the_batch():
  graph = tiny.trace(grpo(kl_coef=0.1), tiny.problem())
  (generate,) = [node for node in graph.nodes if node.name == 'generate']
  for v in generate.writes:
    assert graph.values[v].letters[0] == 'B'
  params = [v for v in generate.reads if v not in generate.rows]
  letters = {graph.values[v].name: graph.values[v].letters for v in params}
  assert letters['state.actor.params.layers.up_DF'] == ('', 'D', 'F')


COMPUTES = {
  'added one': (lambda x: x + 1, 'did arithmetic with'),
  'added to one': (lambda x: 1 + x, 'did arithmetic with'),
  'subtracted itself': (lambda x: x - x, 'did arithmetic with'),
  'multiplied NumPy': (lambda x: np.ones((8, 2)) * x, 'converted'),
  'multiplied JAX': (lambda x: jnp.ones((8, 2)) * x, 'did arithmetic with'),
  'divided': (lambda x: x / 2, 'did arithmetic with'),
  'divided with rest': (lambda x: divmod(x, 2), 'did arithmetic with'),
  'negated': (lambda x: -x, 'did arithmetic with'),
  'multiplied matrices': (lambda x: x @ x, 'did arithmetic with'),
  'rounded': (round, 'did arithmetic with'),
  'inverted': (lambda x: ~x, 'did arithmetic with'),
  'is less': (lambda x: x < 0, 'compared'),
  'is equal': (lambda x: x == x, 'compared'),
  'is not': (lambda x: x != 0, 'compared'),
  'is in': (lambda x: 1 in x, 'looked into'),
  'first': (lambda x: x[0], 'indexed'),
  'masked': (lambda x: x[x], 'indexed'),
  'branched': (lambda x: x if x else -1, 'branched on'),
  'denied': (lambda x: not x, 'branched on'),
  'looped': (lambda x: list(x), 'looped over'),
  'unpacked': (lambda x: [*x], 'looped over'),
  'counted': (len, 'looped over'),
  'number': (float, 'converted'),
  'whole number': (int, 'converted'),
  'NumPy array': (np.asarray, 'converted'),
  'JAX array': (jnp.asarray, 'read .aval of'),
  'sine of NumPy': (np.sin, 'converted'),
  'sum': (lambda x: x.sum(), 'read .sum of'),
  'transposed': (lambda x: x.T, 'read .T of'),
  'at': (lambda x: x.at[0].set(0), 'read .at of'),
}  # fmt: skip


@pytest.mark.parametrize('compute, did', COMPUTES.values(), ids=COMPUTES)
def test_arithmetic_in_a_step_is_refused_with_advice(compute, did):
  with pytest.raises(TypeError) as error:
    trace(lambda state, x: (state, compute(x)))
  message = str(error.value)
  assert did in message
  assert 'float32[8, 2]' in message
  assert message.endswith('move this into a stage.')


@pytest.mark.parametrize(
  'function',
  [
    jnp.sin,
    jax.jit(lambda x: x),
    jax.vmap(lambda x: x),
    lambda x: jax.lax.add(x, x),
    lambda x: jnp.where(x, 1, 0),
    lambda x: jnp.concatenate([x, x]),
  ],
  ids=['jnp.sin', 'jit', 'vmap', 'lax.add', 'jnp.where', 'jnp.concatenate'],
)
def test_a_jax_function_in_a_step_is_refused_with_advice(function):
  with pytest.raises(TypeError, match='into a stage.$'):
    trace(lambda state, x: (state, function(x)))


def test_assigning_to_a_value_is_refused():
  def step(state, x):
    x[0] = 1
    return state, x

  with pytest.raises(TypeError, match='indexed a value .* into a stage'):
    trace(step)


def test_shapes_may_be_read():
  def step(state, x):
    assert (x.shape, x.dtype) == ((8, 2), jnp.float32)
    return state, double(x)

  assert names(trace(step)) == ['double']


@pytest.mark.parametrize(
  'array', [jnp.ones(8), np.ones(8), 1.0], ids=['JAX', 'NumPy', 'float']
)
def test_an_array_created_in_a_step_is_refused_as_an_input(array):
  pair = stages.Stage(lambda x, y: x, 'pair')
  message = (
    f'Stage pair was given a {type(array).__name__} .*carry .* in the state'
  )
  with pytest.raises(TypeError, match=message):
    trace(lambda state, x: (state, pair(x, array)))


@pytest.mark.parametrize(
  'array', [jnp.zeros(3), np.zeros(3), 1.0], ids=['JAX', 'NumPy', 'float']
)
def test_an_array_created_in_a_step_is_refused_as_an_output(array):
  with pytest.raises(TypeError, match='that no stage made.*in a stage'):
    trace(lambda state, x: (state, array))
  with pytest.raises(TypeError, match='that no stage made.*in a stage'):
    trace(lambda state, x: ({'w': array}, x))


@pytest.mark.parametrize(
  'step, message',
  [
    (lambda state, x: ({}, x), "must return a state like .*'w'"),
    (lambda state, x: (state | {'v': x}, x), "must return a state like .*'v'"),
    (
      lambda state, x: (shorten(state), x),
      r'state\.w went from float32\[3\] to float32\[2\]',
    ),
    (
      lambda state, x: (as_integer(state), x),
      r'state\.w went from float32\[3\] to int32\[3\]',
    ),
  ],
  ids=['smaller', 'larger', 'another shape', 'another type'],
)
def test_a_state_of_another_structure_is_refused(step, message):
  with pytest.raises(TypeError, match=message):
    trace(step)


def test_a_step_must_return_its_state_and_its_outputs():
  with pytest.raises(TypeError, match='state, outputs'):
    trace(lambda state, x: state)
  with pytest.raises(TypeError, match='state, outputs'):
    trace(lambda state, x: double(x))


def test_a_value_of_another_recording_is_refused():
  kept = []
  trace(lambda state, x: (state, kept.append(double(x))))
  with pytest.raises(TypeError, match='another recording'):
    trace(lambda state, x: (state, double(kept[0])))
  with pytest.raises(TypeError, match='another recording'):
    trace(lambda state, x: (state, kept[0]))


def test_rows_of_different_number_are_refused():
  pair = stages.Stage(lambda x, y: x, 'pair')
  with pytest.raises(TypeError, match="pair of grain 'row'.*`unbatched`"):
    trace(lambda state, x: (state, pair(x, state['w'])))


def test_a_scalar_is_refused_as_a_row():
  total = stages.Stage(lambda x: x.sum(), 'total')
  with pytest.raises(TypeError, match="total of grain 'row'"):
    trace(lambda state, x: (state, total(x)))


def test_rows_that_are_not_whole_groups_are_refused():
  grouped = stages.Stage(lambda x: x, 'grouped', group_size=3)
  with pytest.raises(TypeError, match='groups of 3 rows .* was given 8 rows'):
    trace(lambda state, x: (state, grouped(x)))


def test_a_stage_that_fails_while_recorded_is_named():
  broken = stages.Stage(lambda x: x.reshape(3), 'broken')
  with pytest.raises(TypeError) as error:
    trace(lambda state, x: (state, broken(x)))
  assert any('broken' in note for note in error.value.__notes__)


def test_a_planner_needs_only_the_fields_of_a_stage():
  # Anything with these fields is a stage: planner and stages never meet.
  anything = types.SimpleNamespace(
    name='anything',
    grain='row',
    unbatched=(),
    group_size=1,
    consumes=(),
    shapes=lambda x: {'y': x, 'z': x},
  )

  def step(state, x):
    return state, x.__record__(anything, (x,))

  assert names(trace(step)) == ['anything']
