import collections
import itertools

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from sharding import mesh as mesh_lib
from sharding import offload, transfer

SPECS = [
  P(), P('data'), P(None, 'data'), P('fsdp', 'data'), P(('data', 'fsdp')),
]  # fmt: skip


def layouts():
  devices = jax.devices()
  for ids, axes in (
    (range(4), {'data': 2, 'fsdp': 2}),
    (range(4, 8), {'data': 4, 'fsdp': 1}),
    (range(2, 6), {'data': 1, 'fsdp': 4}),
  ):
    mesh = mesh_lib.mesh([devices[i] for i in ids], axes)
    yield from (NamedSharding(mesh, spec) for spec in SPECS)
  yield SingleDeviceSharding(devices[3])


PAIRS = list(itertools.product(layouts(), repeat=2))


@pytest.mark.parametrize('shape', [(8, 4), (16, 12)])
def test_moves_are_all_that_a_target_needs_and_nothing_twice(shape):
  x = np.arange(np.prod(shape)).reshape(shape)
  for source, target in PAIRS:
    has = source.devices_indices_map(shape)
    has = {d.id: x[index] for d, index in has.items()}
    begin = {
      d.id: tuple(
        part.indices(n)[0] for part, n in zip(index, shape, strict=True)
      )
      for d, index in source.devices_indices_map(shape).items()
    }
    got = collections.defaultdict(lambda: np.full(shape, -1))
    for move in transfer.moves(shape, source, target):
      box = tuple(slice(*part) for part in move.box)
      own = tuple(
        slice(a - o, b - o)
        for (a, b), o in zip(move.box, begin[move.source], strict=True)
      )
      assert (got[move.target][box] == -1).all(), 'It came twice.'
      got[move.target][box] = has[move.source][own]
    for device, index in target.devices_indices_map(shape).items():
      np.testing.assert_array_equal(got[device.id][index], x[index])


def test_nothing_moves_where_nothing_changes():
  for layout in layouts():
    found = transfer.moves((8, 4), layout, layout)
    assert transfer.bytes_by_link(found, 4) == {}


def test_copies_share_the_giving():
  devices = jax.devices()
  one = NamedSharding(mesh_lib.mesh(devices[:4], {'data': 4}), P())
  other = NamedSharding(mesh_lib.mesh(devices[4:], {'data': 4}), P())
  links = transfer.bytes_by_link(transfer.moves((8, 4), one, other), 4)
  assert links == {(i, i + 4): 128 for i in range(4)}


def test_an_all_gather_costs_what_the_textbook_says():
  mesh = mesh_lib.mesh(jax.devices(), {'fsdp': 8})
  links = transfer.bytes_by_link(
    transfer.moves(
      (64, 2), NamedSharding(mesh, P('fsdp')), NamedSharding(mesh, P())
    ),
    4,
  )
  assert len(links) == 8 * 7
  assert sum(links.values()) == 7 * 64 * 2 * 4


def test_jax_moves_between_any_two_layouts_to_the_bit():
  x = np.arange(96, dtype=np.float32).reshape(8, 12)
  for source, target in PAIRS:
    laid = jax.device_put(jax.device_put(x, source), target)
    np.testing.assert_array_equal(laid, x)
    assert laid.sharding.is_equivalent_to(target, 2)


@pytest.mark.parametrize('layout', list(layouts())[::3])
def test_what_waits_in_host_memory_comes_back_as_it_was(layout):
  x = jax.device_put(np.arange(96, dtype=np.float32).reshape(8, 12), layout)
  (away,) = offload.to_host([x])
  assert away.sharding.memory_kind == 'pinned_host' and offload.is_offloaded(
    away
  )
  same, back = offload.to_device([x, away])
  assert same is x and back.sharding == x.sharding
  np.testing.assert_array_equal(back, x)
