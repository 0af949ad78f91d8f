"""Deferred arrays: the bits of arrays computed at once, and nothing in vain."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np
import pytest

from sharding import deferred
from sharding import mesh as mesh_lib


@pytest.fixture
def parts():
  """Indices of the parts that were read of a file, and `index -> part`."""
  indices = []

  def part(index):
    indices.append(index)
    return np.arange(32, dtype=np.float32).reshape(8, 4)[index]

  return indices, part


def state(part, key):
  """A small state: drawn and read parameters, moments, a rounded copy."""
  a, b = jax.random.split(key)
  params = {
    'w': jax.random.normal(a, (64, 64)) * 0.1,
    'bias': jax.random.uniform(b, (7,), minval=-1.0),
    'stored': deferred.read((8, 4), 'float32', part),
  }
  moments = jax.tree.map(jnp.zeros_like, params)
  rounded = jax.nn.relu(jnp.round(params['stored'] - 3)).astype(jnp.int8)
  numbers = jnp.asarray(np.arange(3.0)), jnp.asarray(2), np.float32(3)
  smooth = jax.nn.softplus(params['w'])
  return params, moments, params, a, rounded, numbers, smooth


def bits(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x)


FIRST = SingleDeviceSharding(jax.devices()[0])
KEY = jax.random.key(3)


def test_what_is_deferred_has_the_bits_of_what_is_computed_at_once(parts):
  want = jax.tree.leaves(state(parts[1], KEY))
  make = lambda: state(parts[1], jax.random.key(3))
  later = jax.tree.leaves(deferred.defer(make))
  for x, y in zip(want, later, strict=True):
    y = deferred.put(y, FIRST)
    assert jax.typeof(x) == jax.typeof(y)
    np.testing.assert_array_equal(bits(x), bits(y))


def test_nothing_is_read_or_computed_that_is_not_needed(parts):
  indices, part = parts

  def fails(index):
    raise OSError(f'{index} was read.')

  def make():
    x = deferred.read((2,), 'float32', fails)
    return jnp.sin(x), state(part, KEY)

  assert jax.eval_shape(make)[1][0]['stored'].shape == (8, 4)
  never, (params, moments, *_) = deferred.defer(make)
  deferred.put(params['w'], FIRST)
  assert not deferred.put(moments['stored'], FIRST).any() and not indices
  with pytest.raises(OSError, match='was read'):
    deferred.put(never, FIRST)


@pytest.mark.parametrize('copies', [1, 2])
def test_no_two_of_the_results_share_memory(parts, copies):
  mesh = mesh_lib.mesh(jax.devices()[:copies], {'data': copies})
  layout = NamedSharding(mesh, PartitionSpec())
  leaves = jax.tree.leaves(deferred.defer(lambda: state(parts[1], KEY)))
  given = jnp.ones(4)
  made = [deferred.put(x, layout) for x in (*leaves, given) if x.ndim]
  shards = [s.data for x in (*made, given) for s in x.addressable_shards]
  where = {x.unsafe_buffer_pointer() for x in shards}
  assert len(where) == len(shards) == copies * len(made) + 1


def test_an_array_is_placed_without_compiling(caplog):
  x = jnp.zeros((3, 17, 29))
  with jax.log_compiles():
    made = deferred.put(x, FIRST)
    assert not caplog.messages
    jnp.sin(x)
  assert caplog.messages, 'Compiling is seen.'
  np.testing.assert_array_equal(made, x)


def test_each_result_of_an_operation_is_freed_by_itself():
  both = jax.jit(lambda x: (jnp.full((7, 11), x), jnp.full((7, 11), -x)))
  leaves = [*deferred.defer(lambda: both(jnp.float32(3)))]
  first = deferred.put(leaves[0], FIRST)
  leaves[0] = None
  alive = [x for x in jax.live_arrays() if x.shape == first.shape]
  assert len(alive) == 2  # An array for each result.
  second = deferred.put(leaves.pop(), FIRST)
  np.testing.assert_array_equal(second, -first)


def test_each_device_reads_its_part(parts):
  indices, part = parts
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 4})
  layout = NamedSharding(mesh, PartitionSpec('fsdp'))
  x = deferred.defer(lambda: deferred.read((8, 4), 'float32', part))
  x = deferred.put(x, layout)
  assert x.sharding == layout and len(indices) == 4
  assert {part(index).shape for index in [*indices]} == {(2, 4)}
  np.testing.assert_array_equal(x, part(...))


def test_a_key_tells_whether_only_shapes_count():
  told = []

  def tell(key):
    told.append((deferred.only_shapes(key), deferred.is_deferring()))

  jax.eval_shape(tell, KEY)
  deferred.defer(lambda: tell(jax.random.split(KEY)[0]))
  tell(KEY)
  assert told == [(True, False), (False, True), (False, False)]


def test_what_is_read_in_another_type_is_read_part_by_part(parts):
  indices, part = parts
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 4})
  layout = NamedSharding(mesh, PartitionSpec('fsdp'))

  def make():
    x = deferred.read((8, 4), 'float32', lambda index: part(index) + 1 / 3)
    return deferred.astype(x, 'bfloat16'), deferred.astype(x, 'float32')

  want = make()
  assert [x.dtype for x in want] == [jnp.bfloat16, jnp.float32]
  indices.clear()
  for x, y in zip(deferred.defer(make), want, strict=True):
    x = deferred.put(x, layout)
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(bits(x), bits(y))
  assert {part(index).shape for index in [*indices]} == {(2, 4)}
