import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stages
from stages import metrics
from stages.learn import minibatches


@stages.stage('double')
def double(x):
  return 2 * x


def test_a_stage_called_with_arrays_runs():
  np.testing.assert_array_equal(double(jnp.arange(3)), [0, 2, 4])
  np.testing.assert_array_equal(double(np.arange(3)), [0, 2, 4])


def test_a_stage_called_within_a_function_is_part_of_it():
  grad = jax.grad(lambda x: double(x).sum())(jnp.ones(3))
  np.testing.assert_array_equal(grad, [2, 2, 2])


class Symbol:
  def __record__(self, stage, args):
    return stage.name, args


def test_a_stage_called_with_a_symbol_is_recorded_by_it():
  symbol = Symbol()
  assert double(symbol) == ('double', (symbol,))
  pair = stages.Stage(lambda x, y: x, 'pair')
  args = (jnp.ones(3), {'deep': [symbol]})
  assert pair(*args) == ('pair', args)


def test_the_decorator_says_what_the_class_says():
  @stages.stage('total', 'sum', (1,), group_size=4)
  def total(x, scale):
    return (scale * x).sum()

  assert (total.name, total.grain, total.unbatched) == ('total', 'sum', (1,))
  assert (total.group_size, total.host) == (4, False)


def test_two_stages_of_one_function_are_two():
  assert stages.Stage(abs, 'abs') != stages.Stage(abs, 'abs')


def test_shapes_are_those_of_what_it_returns():
  make = stages.Stage(lambda x: {'y': x[:, 0], 'z': x > 0}, 'make')
  like = jax.ShapeDtypeStruct((4, 2), jnp.float32)
  shapes = make.shapes(like)
  outputs = make(jnp.ones((4, 2)))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
    lambda x: (x.shape, x.dtype), outputs
  )


def row(x):
  return jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)


def on_host(fn, like=row):
  return stages.Stage(fn, 'judge', host=True, out_shapes=like)


def test_a_host_stage_is_given_numpy_and_may_return_it():
  def judge(x):
    assert type(x) is np.ndarray
    return np.float32(x.sum(1))

  np.testing.assert_array_equal(on_host(judge)(jnp.ones((3, 2))), [2, 2, 2])


def test_a_host_stage_is_given_what_has_no_rows_as_it_lies():
  params = {'w': jnp.ones(3)}

  def judge(given, x):
    assert given['w'] is params['w'] and type(x) is np.ndarray
    return np.float32(x.sum(1))

  stage = stages.Stage(
    judge, 'judge', unbatched=(0,), host=True, out_shapes=lambda _, x: row(x)
  )
  np.testing.assert_array_equal(stage(params, jnp.ones((3, 2))), [2, 2, 2])


def test_a_host_stage_without_a_promise_of_shapes_is_refused():
  with pytest.raises(
    ValueError, match='judge runs on the host.*give it `out_shapes`'
  ):
    stages.Stage(lambda x: x, 'judge', host=True)


@pytest.mark.parametrize(
  'output',
  [
    np.zeros(2, np.float32),
    np.zeros(3, np.float64),
    (np.zeros(3, np.float32),),
    {'reward': np.zeros(3, np.float32)},
    None,
  ],
  ids=['shape', 'type', 'tuple', 'dict', 'nothing'],
)
def test_a_host_stage_that_breaks_its_promise_is_refused(output):
  with pytest.raises(TypeError, match='judge declares outputs .* but returned'):
    on_host(lambda x: output)(jnp.ones((3, 2)))


def test_a_host_stage_that_returns_no_arrays_is_refused():
  with pytest.raises(TypeError, match='judge declares outputs .* but returned'):
    on_host(lambda x: [1.0, 1.0, 1.0])(jnp.ones((3, 2)))


def test_a_host_stage_is_shaped_without_being_called():
  def judge(x):
    raise AssertionError

  shape = on_host(judge).shapes(jax.ShapeDtypeStruct((3, 2), jnp.int32))
  assert (shape.shape, shape.dtype) == ((3,), jnp.float32)


def test_a_row_has_the_key_of_its_place_in_the_whole_batch():
  key = jax.random.key(3)
  of_many = stages.keys(key, {'a': jnp.ones((8, 2)), 'b': jnp.ones(8)})
  of_few = stages.keys(key, jnp.ones((4, 7)))
  data = jax.random.key_data
  np.testing.assert_array_equal(data(of_many)[:4], data(of_few))
  for i in range(8):
    want = data(jax.random.fold_in(key, i))
    np.testing.assert_array_equal(data(of_many)[i], want)
  assert len({tuple(k) for k in data(of_many).tolist()}) == 8


@pytest.mark.parametrize('n', [1, 2, 4])
def test_minibatches_are_runs_of_rows(n):
  tree = {'x': jnp.arange(24).reshape(8, 3), 'y': (jnp.arange(8),)}
  runs = minibatches.split(n, group_size=2)(tree)
  assert len(runs) == n
  again = jax.tree.map(lambda *parts: jnp.concatenate(parts), *runs)
  jax.tree.map(np.testing.assert_array_equal, again, tree)
  assert {x.shape[0] for run in runs for x in jax.tree.leaves(run)} == {8 // n}


@pytest.mark.parametrize('n, group_size', [(3, 1), (2, 3), (8, 2)])
def test_minibatches_that_would_break_a_group_are_refused(n, group_size):
  rows = f'a multiple of {n} groups, which is {n * group_size} rows'
  with pytest.raises(ValueError, match=f'8 rows .* {rows}'):
    minibatches.split(n, group_size)(jnp.arange(8))


def test_sums_merge_as_metrics_and_arrays_do():
  total = stages.Stage(
    lambda x: {'sum': x.sum(0), 'max': metrics.maximum(x)}, 'total', 'sum'
  )
  x = jnp.arange(12.0).reshape(6, 2)
  whole, parts = total(x), [total(part) for part in jnp.split(x, 3)]
  merged = total.merge(total.merge(parts[0], parts[1]), parts[2])
  jax.tree.map(np.testing.assert_array_equal, merged, whole)
