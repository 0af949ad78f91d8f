"""Updates of arrays in host memory equal updates on the device, to the bit."""

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from sharding import elementwise, offload, slices, streaming
from sharding import mesh as mesh_lib

SHAPES = {'embed': (16, 8), 'bias': (6,), 'layers': (3, 4, 8)}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
  """Slices of a row each, so that every array has several."""
  monkeypatch.setattr(slices, 'SLICE', 1)


def problem(optimizer):
  """An update of parameters and moments by clipped gradients, on leaves.

  Returns:
    The function, its arguments, and for each array of moments that a step
    replaces the position of the argument and of the result.
  """
  keys = iter(jax.random.split(jax.random.key(0), 6))
  params, grads = (
    {k: jax.random.normal(next(keys), s) for k, s in SHAPES.items()}
    for _ in range(2)
  )
  state = optimizer.init(params)
  leaves, tree = jax.tree.flatten((params, state, grads))

  def update(*leaves):
    params, state, grads = jax.tree.unflatten(tree, leaves)
    changes, state = optimizer.update(grads, state, params)
    norm = optax.tree.norm(grads)
    return jax.tree.leaves((optax.apply_updates(params, changes), state, norm))

  n = len(params)
  moments = range(n, n + len(jax.tree.leaves(state)))
  return update, leaves, {i: i for i in moments if leaves[i].ndim}


def adamw(**kwargs):
  return optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.1, **kwargs)
  )


def layouts():
  mesh = mesh_lib.mesh(jax.devices()[:4], {'data': 2, 'fsdp': 2})

  def shared(shape):
    return NamedSharding(mesh, P('fsdp') if shape[:1] == (16,) else P())

  yield lambda shape: SingleDeviceSharding(jax.devices()[0])
  yield shared
  yield lambda shape: NamedSharding(
    mesh, P(None, None, ('data', 'fsdp')) if len(shape) == 3 else P()
  )


def compiled(fn, leaves, layout, pairs):
  """Compiles an update that takes some of its arguments in host memory."""
  where = [
    layout(x.shape).with_memory_kind(
      offload.HOST if i in pairs else offload.DEVICE
    )
    for i, x in enumerate(leaves)
  ]
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  donated = *range(len(SHAPES)), *pairs
  run = streaming.streamed(fn, shapes, where, pairs, donated) if pairs else fn
  # The new state, which has the layout of the old one, and the norm.
  out = [*where[: len(jax.eval_shape(fn, *leaves)) - 1], layout(())]
  call = jax.jit(
    run, in_shardings=where, out_shardings=out, donate_argnums=donated
  )
  return call.lower(*shapes).compile(), where


def called(call, leaves, where):
  """Results for copies of the arguments, which the call may overwrite."""
  return call(
    *(
      jax.device_put(np.array(x), at)
      for x, at in zip(leaves, where, strict=True)
    )
  )


@pytest.mark.parametrize('layout', list(layouts()))
def test_an_update_in_host_memory_changes_no_bit(layout):
  fn, leaves, pairs = problem(adamw())
  results = []
  for some in ({}, pairs):
    call, where = compiled(fn, leaves, layout, some)
    results.append(called(call, leaves, where))
  for i, (want, got) in enumerate(zip(*results, strict=True)):
    np.testing.assert_array_equal(got, want)
    kind = offload.HOST if i in pairs else offload.DEVICE
    assert got.sharding.memory_kind == kind


def test_the_parts_of_adamw_are_its_parameters():
  fn, leaves, pairs = problem(adamw())
  parts = elementwise.parts(elementwise.inlined(fn, *leaves).jaxpr, [*pairs])
  assert len(parts) == len(SHAPES)
  assert all(part.elementwise for part in parts)
  for part in parts:
    shapes = {leaves[i].shape for i in part.reads}
    assert len(part.reads) == 2 and len(part.writes) == 3 and len(shapes) == 1


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.adafactor(0.1, min_dim_size_to_factor=4),
    optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio()),
    optax.conditionally_mask(optax.adam(0.1), lambda step: step >= 0),
  ],
)
def test_an_update_that_reads_whole_arrays_moves_them_whole(optimizer):
  fn, leaves, pairs = problem(optimizer)
  parts = elementwise.parts(elementwise.inlined(fn, *leaves).jaxpr, [*pairs])
  assert not all(part.elementwise for part in parts)
  layout = next(layouts())
  results = []
  for some in ({}, pairs):
    call, where = compiled(fn, leaves, layout, some)
    results.append(called(call, leaves, where))
  for want, got in zip(*results, strict=True):
    np.testing.assert_array_equal(got, want)


def test_slices_divide_an_array_evenly(monkeypatch):
  monkeypatch.setattr(slices, 'SLICE', 100)
  assert slices.slice_rows((12, 5), 4, None) == 6  # Five rows have 100 bytes.
  assert slices.slice_rows((12, 100), 4, 'gpu') == 1
  assert slices.slice_rows((7, 5), 4, 'gpu') == 7
  assert slices.slice_rows((3,), 4, None) == 3
  assert slices.slice_rows((12, 100), 4, 'tpu') == 12  # Parts of a tile.
  assert slices.slice_rows((12, 10, 10), 4, 'tpu') == 1


@pytest.mark.parametrize('columns', [0, 1, 3, 7, 40])
def test_a_slice_has_the_fewest_rows_of_100_bytes(monkeypatch, columns):
  monkeypatch.setattr(slices, 'SLICE', 100)
  for rows in range(1, 150):
    some = [n for n in range(1, rows) if not rows % n and n * columns * 4 > 99]
    found = slices.slice_rows((rows, columns), 4, None)
    assert found == min(some, default=rows)
