import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from rlinf_jax.runtime.places import micro_batch
from rlinf_jax.runtime.places import place as place_lib
import stages
from stages import metrics
import tiny

ROWS = [1, 2, 4, 8]


def rows(seed=0):
  """Rows of integers, whose sums are exact in any order."""
  rng = np.random.default_rng(seed)
  return (
    jnp.asarray(rng.integers(-9, 9, (8, 3)), jnp.float32),
    {'mask': jnp.asarray(rng.integers(0, 2, (8,)), jnp.float32), 'none': ()},
  )


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  types = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (got, want)]
  assert types[0] == types[1]


@pytest.mark.parametrize('n', ROWS)
def test_rows_in_micro_batches_are_the_rows(n):
  @stages.stage('weigh', unbatched=(1,))
  def weigh(x, w, y):
    return {'z': x @ w, 'y': (y['mask'], x[:, 0] > 0)}

  x, y = rows()
  w = jnp.ones((3, 2))
  got = jax.jit(micro_batch.in_micro_batches(weigh, n))(x, w, y)
  same(got, weigh(x, w, y))


@pytest.mark.parametrize('n', ROWS)
def test_sums_in_micro_batches_are_the_sums(n):
  @stages.stage('measure', 'sum', unbatched=(0,))
  def measure(w, x, y):
    return {
      'sum': (x * w).sum(0),
      'count': x.shape[0] * jnp.ones((), jnp.int32),
      'mean': metrics.mean(x[:, 0], y['mask']),
      'largest': metrics.maximum(x[:, 0], y['mask']),
      'moments': metrics.moments(x),
      'lengths': metrics.histogram(jnp.abs(x[:, 0]), 10),
      'first': metrics.first_rows(x, 1),
    }

  x, y = rows(1)
  got = jax.jit(micro_batch.in_micro_batches(measure, n))(2.0, x, y)
  want = measure(2.0, x, y)
  # Means of pieces are rounded; sums are exact.
  moments = got.pop('moments'), want.pop('moments')
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), *moments
  )
  same(got, want)


@pytest.mark.parametrize('n', ROWS)
def test_a_sum_without_a_zero_starts_from_its_first_part(n):
  # All values are below zero, and so is their maximum.
  largest = stages.Stage(lambda x: metrics.maximum(x), 'largest', 'sum')
  got = jax.jit(micro_batch.in_micro_batches(largest, n))(
    -1.0 - jnp.arange(8.0)
  )
  assert got.max == -1.0


def test_a_part_that_is_not_finite_makes_the_sum_not_finite():
  total = stages.Stage(lambda x: x.sum(), 'total', 'sum')
  for bad in (jnp.nan, jnp.inf):
    x = jnp.ones(8).at[5].set(bad)
    got = jax.jit(micro_batch.in_micro_batches(total, 2))(x)
    np.testing.assert_array_equal(got, bad)


def test_keys_can_be_cut():
  draw = stages.Stage(lambda key: jax.vmap(jax.random.normal)(key), 'draw')
  keys = jax.random.split(jax.random.key(0), 8)
  same(jax.jit(micro_batch.in_micro_batches(draw, 2))(keys), draw(keys))


def test_micro_batches_are_taken_in_order():
  # A group that is split between micro-batches would change the result.
  @stages.stage('group_advantage', group_size=4)
  def compare(x):
    groups = x.reshape(-1, 4)
    return (groups - groups.mean(1, keepdims=True)).reshape(-1)

  x = jnp.arange(16.0) ** 2
  for n in (4, 8):
    same(jax.jit(micro_batch.in_micro_batches(compare, n))(x), compare(x))


@pytest.mark.parametrize('place', ['one', 'data', 'fsdp', 'mixed'])
def test_micro_batches_save_memory_and_add_no_work(place):
  @stages.stage('gradient', 'sum', unbatched=(0,))
  def gradient(w, x):
    return jax.grad(lambda w: jnp.sin(jnp.sin(x @ w['w'])).sum())(w)

  def compiled(rows):
    like = {'w': jax.ShapeDtypeStruct((64, 512), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    graph = flow_lib.trace(lambda w, x: (w, gradient(w, x)), like, batch)
    holder = place_lib.Place('all', tiny.PLACES[place], {'gradient': rows})
    return holder.compile(graph, graph.nodes[0])

  whole, small = compiled(8192), compiled(1024)
  memory = lambda call: call.memory_analysis().temp_size_in_bytes
  assert memory(small) < memory(whole) / 3
  # XLA counts the body of a loop once: one of eight micro-batches.
  work = lambda call: call.cost_analysis()['flops']
  assert work(small) < work(whole) / 7
