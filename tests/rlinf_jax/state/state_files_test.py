"""Parts of a state, written by several and read in other layouts."""

import functools
import gc
import shutil
import threading
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rlinf_jax.run_files import checkpoint
from rlinf_jax.state import file_arrays, saved_state, state_files, state_readers
import saved
from sharding import deferred
from sharding import mesh as mesh_lib
from stages import base

FIRST = SingleDeviceSharding(jax.devices()[0])


def state():
  return {
    'w_FD': jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4),
    'none': jnp.zeros((0, 3)),
    'key': jax.random.key(7),
    'count': jnp.int32(5),
    base.FROZEN: {'teacher': jnp.arange(6.0)},
  }


SHAPES = jax.eval_shape(state)


def bits(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x)


def write(folder, step=1):
  """A checkpoint's state in two parts; returns its reader."""
  folder = folder / str(step) / saved_state.STATE
  folder.mkdir(parents=True)
  arrays = saved.Tree(state()).arrays
  for part in range(2):
    own = {leaf.name: x for leaf, x in arrays[part::2] if not leaf.is_frozen}
    state_files.start_writing(folder / str(part), own)()
  return saved_state.SavedState(
    str(folder.parents[1]),
    step,
    saved.Tree(state()).checksums(),
    state_readers.FirstState(state),
  )


def test_a_state_in_parts_is_read_to_the_bit(tmp_path):
  got = saved.whole(write(tmp_path), SHAPES)
  for x, y in zip(*map(jax.tree.leaves, (got, state())), strict=True):
    assert jax.typeof(x) == jax.typeof(y)
    np.testing.assert_array_equal(bits(x), bits(y))


def test_each_place_is_given_its_own_arrays_in_its_layout(tmp_path):
  mesh = mesh_lib.mesh(jax.devices()[:4], {'fsdp': 4})
  split = NamedSharding(mesh, PartitionSpec('fsdp'))
  host = FIRST.with_memory_kind('pinned_host')
  numbers = [
    leaf.name for leaf in state_files.leaves(jax.tree.structure(SHAPES))
  ]
  w = numbers.index('w_FD')
  layouts = {w: {'a': split, 'b': host}}
  found = {place: x for _, place, x in write(tmp_path).read(SHAPES, layouts)}
  assert found['a'].sharding == split and found['b'].sharding == host
  for x in found.values():
    np.testing.assert_array_equal(x, state()['w_FD'])


def test_no_device_shares_the_memory_of_what_it_reads(tmp_path):
  mesh = mesh_lib.mesh(jax.devices()[:2], {'data': 2})
  layout = NamedSharding(mesh, PartitionSpec())
  layouts = {i: {'a': layout} for i in range(len(jax.tree.leaves(SHAPES)))}
  made = [x for *_, x in write(tmp_path).read(SHAPES, layouts)]
  where = [
    shard.data.unsafe_buffer_pointer()
    for x in made
    if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    for shard in x.addressable_shards
  ]
  assert len({*where}) == len(where) == 6


def test_other_frozen_parameters_are_refused_where_they_are_read(tmp_path):
  reader = write(tmp_path)
  other = state() | {base.FROZEN: {'teacher': jnp.arange(6.0) + 1}}
  reader = saved_state.SavedState(
    reader.folder, 1, reader.frozen, state_readers.FirstState(lambda: other)
  )
  layouts = {i: {'': FIRST} for i in range(len(jax.tree.leaves(SHAPES)))}
  with pytest.raises(
    ValueError,
    match='step 1 in .* other frozen weights.*held them in another type',
  ):
    next(reader.read(SHAPES, layouts))  # Before any array is given away.


def test_constants_are_found_when_an_older_checkpoint_is_gone(tmp_path):
  reader = write(tmp_path, 4)
  write(tmp_path, 10)
  (tmp_path / '12.orbax-checkpoint-tmp').mkdir()
  assert reader.of_constants().step == 10
  assert reader.of_constants().frozen == reader.frozen


def test_a_folder_that_a_machine_lacks_is_named(tmp_path):
  reader = write(tmp_path)
  (tmp_path / '1').rename(tmp_path / '2')
  with pytest.raises(FileNotFoundError, match='that all machines share'):
    saved.whole(reader, SHAPES)
  with pytest.raises(FileNotFoundError, match='that all machines share'):
    state_files.start_writing(tmp_path / '1/state/0', {'x': jnp.ones(2)})


def test_an_export_holds_one_array_at_a_time():
  """It reads those that it uses, each once, and computes no other."""
  calls, made = [], []

  def part(name, index):
    calls.append(name)
    return np.full((3, 4), ord(name), np.float32)[index]

  def make():
    made.append(1)
    read = functools.partial(deferred.read, (3, 4), 'float32')
    arrays = {x: read(functools.partial(part, x)) for x in 'abc'}
    return arrays | {'twice': 2 * arrays['a'], 'count': jnp.zeros(())}

  shapes = jax.eval_shape(make)
  made.clear()
  first = state_readers.RepeatedReader(state_readers.FirstState(make))
  arrays = file_arrays.of_state(first, shapes)
  assert not calls and arrays['a'].shape == (3, 4) and arrays['a'].size == 12
  for layer in range(3):
    assert (arrays['b'][layer] == ord('b')).all()
  assert (np.asarray(arrays['c'], np.float64) == ord('c')).all()
  assert calls == ['b', 'c']
  assert (2 * arrays['a'] == arrays['a'] + arrays['a']).all()
  np.testing.assert_array_equal(jnp.asarray(arrays['c']), part('c', ...))
  assert len(made) == 1
  # No computed array is kept beside the one that is used.
  gc.collect()
  live = len(jax.live_arrays())
  calls.clear()
  for _ in range(2):
    assert (np.asarray(arrays['twice']) == 2 * ord('a')).all()
    assert (np.asarray(arrays['b']) == ord('b')).all()
  assert calls == ['a', 'b'] * 2 and len(made) == 1
  gc.collect()
  assert len(jax.live_arrays()) <= live


def test_an_export_looks_for_the_files_of_a_checkpoint_once(
  tmp_path, monkeypatch
):
  found, stored = [], state_files.stored
  monkeypatch.setattr(
    state_files, 'stored', lambda x: found.append(x) or stored(x)
  )
  arrays = file_arrays.of_state(write(tmp_path), SHAPES)
  np.testing.assert_array_equal(arrays['w_FD'], state()['w_FD'])
  assert arrays['count'] == 5
  assert found == [tmp_path / '1/state']


def test_a_writer_that_cannot_start_is_closed(tmp_path, monkeypatch):
  import orbax.checkpoint as ocp

  closed, close = [], ocp.StandardCheckpointer.close
  monkeypatch.setattr(
    ocp.StandardCheckpointer, 'close', lambda x: close(x) or closed.append(x)
  )
  (tmp_path / '0').mkdir()
  with pytest.raises(ValueError, match='already exists'):
    state_files.start_writing(tmp_path / '0', {'x': jnp.ones(2)})
  assert len(closed) == 1
  finish = state_files.start_writing(tmp_path / '1', {'x': jnp.ones(2)})
  assert len(closed) == 1
  finish()
  assert len(closed) == 2


def test_a_checkpoint_of_another_layout_is_refused_in_a_sentence(tmp_path):
  import orbax.checkpoint as ocp

  files = checkpoint.Checkpoints(tmp_path, 1)
  files.save(1, saved.Tree(state()), {'n': np.zeros(1)}, {})
  files.wait()
  folder = tmp_path / '1/state'
  with pytest.raises(ValueError, match='other is in no file of the checkp.*w_'):
    state_files.read(
      state_files.stored(folder),
      {'other': jax.ShapeDtypeStruct((2,), 'float32', sharding=FIRST)},
    )
  shutil.rmtree(folder)
  with pytest.raises(FileNotFoundError, match='no .*1/state on the machine'):
    saved.load(files, state(), {'n': np.zeros(1)})
  with ocp.StandardCheckpointer() as writer:  # As versions before parts.
    writer.save(folder, {'w_FD': state()['w_FD']})
  with pytest.raises(ValueError, match='1/state was written by an earlier ver'):
    saved.load(files, state(), {'n': np.zeros(1)})
  files.close()


def test_a_part_that_is_not_waited_for_is_not_closed_as_a_program_ends(
  tmp_path, monkeypatch
):
  """That would start JAX again at the end of a program, which would hang."""
  closed = []
  close = ocp.StandardCheckpointer.close
  monkeypatch.setattr(
    ocp.StandardCheckpointer, 'close', lambda x: closed.append(x)
  )
  finish = state_files.start_writing(tmp_path / 'part', {'w': jnp.ones(3)})
  for thread in threading.enumerate():
    if thread.name == 'async_save':
      thread.join(30)  # Until then, it holds the writer.
  finish = weakref.ref(finish)
  gc.collect()
  assert finish() is None and not closed
  monkeypatch.setattr(ocp.StandardCheckpointer, 'close', close)
  state_files.start_writing(tmp_path / 'other', {'w': jnp.ones(3)})()
  assert state_files.stored(tmp_path).keys() == {'w'}
