"""Every array arrives as it was sent, by each transport."""

import socket
import threading

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import psutil
import pytest

from rlinf_jax.runtime.ray.transport import channel, serialize
from sharding import mesh as mesh_lib

TREES, LEAVES = 500, 4  # For each transport.
TYPES = 'bool int8 uint8 int32 float16 float32 bfloat16 float8_e4m3fn'.split()
# Shapes, and their partition specs on a mesh.
LAYOUTS = [
  ((), None),
  ((0,), None),
  ((3, 5), None),
  ((7,), None),
  ((8,), P('data')),
  ((16, 3), P('data')),
  ((4, 8), P('data', 'tensor')),
  ((8, 2), P(('data', 'tensor'))),
  ((5, 3), P()),
]


@pytest.fixture(scope='module')
def ends():
  return channel.Channels('127.0.0.1'), channel.Channels('127.0.0.1')


def meshes():
  devices = jax.devices()
  return [
    mesh_lib.mesh(some, {'data': 2, 'tensor': 2})
    for some in (devices[:4], devices[4:])
  ]


def leaf(rng, mesh):
  """NumPy data, the array at one end, and the sharding at the other."""
  shape, spec = LAYOUTS[rng.integers(len(LAYOUTS))]
  dtype = jnp.dtype(TYPES[rng.integers(len(TYPES))])
  bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  bits = bits % 2 if dtype.kind == 'b' else bits
  x = bits.view(dtype).reshape(shape)
  if spec is None:
    one, other = (
      jax.sharding.SingleDeviceSharding(m.devices.flat[0]) for m in mesh
    )
  else:
    one, other = (NamedSharding(m, spec) for m in mesh)
  return x, jax.device_put(x, one), other


@pytest.mark.parametrize(
  'small', [1, 1 << 62], ids=['by a connection', 'in calls']
)
def test_trees_arrive_bit_for_bit(ends, fully_optimized, monkeypatch, small):
  monkeypatch.setattr(channel, 'SMALL', small)
  here, there = ends
  rng, mesh = np.random.default_rng(0), meshes()
  pulled = 0
  for _ in range(TREES):
    leaves = [leaf(rng, mesh) for _ in range(LEAVES)]
    sent = [here.pack(x, False) for _, x, _ in leaves]
    pulled += sum(isinstance(one, channel.Offer) for one in sent)
    for one, (want, _, layout) in zip(sent, leaves, strict=True):
      got = there.unpack(one, layout)
      assert got.sharding == layout and got.dtype == want.dtype
      assert np.asarray(got).tobytes() == want.tobytes()
  assert (pulled > TREES) == (small == 1)


def test_an_offered_array_may_be_overwritten_after_it_was_pulled(
  ends, monkeypatch
):
  monkeypatch.setattr(channel, 'SMALL', 1)
  here, there = ends
  x = jax.device_put(np.arange(1024.0, dtype=np.float32))
  other = jnp.copy(x)
  sent = here.pack(x, False)
  assert here.wait_until_pulled([other], 0)
  assert not here.wait_until_pulled([other, x], 0.01)
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  received = []
  pull = lambda: received.append(there.unpack(sent, layout))
  late = threading.Timer(0.1, pull)
  late.start()
  assert here.wait_until_pulled([x], 30)
  late.join()
  jax.block_until_ready(jax.jit(lambda x: 0 * x, donate_argnums=0)(x))
  np.testing.assert_array_equal(received[0], np.arange(1024, dtype=np.float32))
  here.pack(other, False)
  assert not here.wait_until_pulled([other], 0.01)
  here.cancel_offers()
  assert here.wait_until_pulled([other], 0)


def test_an_array_is_released_if_its_receiver_leaves(ends, monkeypatch):
  monkeypatch.setattr(channel, 'SMALL', 1)
  here, _ = ends
  x = jnp.zeros(1 << 23)  # More than the system buffers.
  ticket = here.pack(x, False).ticket
  with socket.create_connection(ticket[:2]) as receiver:
    receiver.sendall(ticket.number)
    assert not here.wait_until_pulled([x], 0.1)
  assert here.wait_until_pulled([x], 30)


def listening():
  """Addresses at which this process listens."""
  return {
    one.laddr
    for one in psutil.Process().net_connections('inet')
    if one.status == psutil.CONN_LISTEN
  }


def test_a_port_is_opened_with_the_first_offer_and_on_one_interface(
  monkeypatch,
):
  monkeypatch.setattr(channel, 'SMALL', 1)
  before = listening()
  ends = channel.Channels('127.0.0.1')
  ends.cancel_offers()
  assert listening() == before
  ends.pack(jnp.zeros(1024), False)
  (opened,) = listening() - before
  assert opened.ip == '127.0.0.1'


def test_the_transport_depends_on_size_and_type():
  key = jax.random.split(jax.random.key(0), 1 << 18)
  plain = np.dtype('float32')
  assert channel.transport(plain, 100, False) == 'in calls'
  assert channel.transport(plain, channel.SMALL, False) == 'by a connection'
  assert channel.transport(plain, channel.SMALL, True) == 'by shared memory'
  assert (
    channel.transport(key.dtype, channel.SMALL, False) == 'by the object store'
  )
  assert (
    channel.transport(plain, channel.SMALL, False, True)
    == 'by the object store'
  )
  assert channel.size(serialize.pack(np.zeros((3, 4), np.float32))) == 48
