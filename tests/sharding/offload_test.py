import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from sharding import mesh as mesh_lib
from sharding import multihost, offload


def layouts():
  mesh = mesh_lib.mesh(jax.devices()[:4], {'data': 2, 'fsdp': 2})
  for spec in (P(), P(None, 'data'), P('fsdp', 'data'), P(('data', 'fsdp'))):
    yield NamedSharding(mesh, spec)
  yield SingleDeviceSharding(jax.devices()[3])


@pytest.mark.parametrize('layout', list(layouts()))
def test_an_offloaded_array_is_restored_to_the_bit(layout):
  x = jax.device_put(np.arange(96, dtype=np.float32).reshape(8, 12), layout)
  (host,) = offload.to_host([x])
  assert host.sharding.memory_kind == 'pinned_host'
  assert offload.is_offloaded(host) and not offload.is_offloaded(x)
  same, back = offload.to_device([x, host])
  assert same is x and back.sharding == x.sharding
  np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize('kinds', [(offload.DEVICE, offload.HOST),
                                   (offload.HOST, offload.DEVICE)])  # fmt: skip
@pytest.mark.parametrize('count', [1, 2])
def test_some_of_many_copies_move_to_another_memory(count, kinds):
  devices = jax.devices()
  there, here = (
    NamedSharding(
      mesh_lib.mesh(some, {'data': len(some)}), P(), memory_kind=kind
    )
    for some, kind in zip((devices[:4], devices[:count]), kinds, strict=True)
  )
  x = np.arange(6, dtype=np.float32)
  found = multihost.put(jax.device_put(x, there), here)
  assert found.sharding == here
  np.testing.assert_array_equal(found, x)
