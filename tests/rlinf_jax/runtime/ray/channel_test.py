"""Every array arrives as it was sent, by each transport."""

import collections
import pickle
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import psutil
import pytest

from rlinf_jax.runtime.ray import channel, serialize
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
  """NumPy data, the array at one end, the sharding at the other, and axes."""
  shape, spec = LAYOUTS[rng.integers(len(LAYOUTS))]
  dtype = jnp.dtype(TYPES[rng.integers(len(TYPES))])
  bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  bits = bits % 2 if dtype.kind == 'b' else bits
  x = bits.view(dtype).reshape(shape)
  if spec is None:
    one, other = (
      jax.sharding.SingleDeviceSharding(m.devices.flat[0]) for m in mesh
    )
    axes = ()
  else:
    one, other = (NamedSharding(m, spec) for m in mesh)
    # With equal axes it is pulled shard by shard; otherwise gathered first.
    axes = (('data', 2), ('tensor', 2)) if rng.integers(2) else ()
  return x, jax.device_put(x, one), other, axes


@pytest.mark.parametrize(
  'small', [1, 1 << 62], ids=['device to device', 'in calls']
)
def test_trees_arrive_bit_for_bit(ends, fully_optimized, monkeypatch, small):
  monkeypatch.setattr(channel, 'SMALL', small)
  here, there = ends
  rng, mesh = np.random.default_rng(0), meshes()
  pulled = 0
  for _ in range(TREES):
    leaves = [leaf(rng, mesh) for _ in range(LEAVES)]
    sent = [here.pack(x, axes, False) for _, x, _, axes in leaves]
    pulled += sum(isinstance(one, channel.Offer) for one in sent)
    for one, (want, _, layout, _) in zip(sent, leaves, strict=True):
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
  sent = here.pack(x, (), False)
  assert here.wait_until_pulled([other], 0)
  assert not here.wait_until_pulled([other, x], 0.01)
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  got = jax.block_until_ready(there.unpack(sent, layout))
  waits = threading.Timer(0.1, here.mark_pulled, [sent.number])
  waits.start()
  assert here.wait_until_pulled([x], 30)
  jax.block_until_ready(jax.jit(lambda x: 0 * x, donate_argnums=0)(x))
  np.testing.assert_array_equal(got, np.arange(1024, dtype=np.float32))
  here.pack(other, (), False)
  assert not here.wait_until_pulled([other], 0.01)
  here.cancel_offers()
  assert here.wait_until_pulled([other], 0)


def offers(ends, n):
  """Offers so many arrays of 1,024 numbers."""
  some = [jax.device_put(np.full(1024, i, np.float32)) for i in range(n)]
  return [ends.pack(x, (), False) for x in some]


def test_numbers_of_offers_cannot_be_guessed_and_are_never_used_again(
  monkeypatch,
):
  monkeypatch.setattr(channel, 'SMALL', 1)
  numbers = []
  for _ in range(2):  # As of two processes, or of two runs.
    ends = channel.Channels('127.0.0.1')
    for _ in range(2):
      numbers += [offer.number for offer in offers(ends, 250)]
      ends.cancel_offers()
  assert len({*numbers}) == 1000
  assert min(numbers) > 1 << 40 and max(numbers) > 1 << 63
  # Every bit is set in half of them: 15 standard deviations are 237.
  bits = np.array(numbers, np.uint64)[:, None] >> np.arange(64, dtype=np.uint64)
  assert np.all(np.abs((bits & np.uint64(1)).sum(0).astype(int) - 500) < 237)


@pytest.mark.slow
def test_a_process_of_another_run_obtains_nothing_by_guessing(monkeypatch):
  monkeypatch.setattr(channel, 'SMALL', 1)
  ends = channel.Channels('127.0.0.1')
  first, second = offers(ends, 2)
  guesses = [*range(16), first.number + 1, first.number ^ 1]
  guesses += [secrets.randbits(64) for _ in range(16)]
  command = [sys.executable, '-m', 'tests.rlinf_jax.runtime.ray.foreign']
  done = subprocess.run(
    # With the number itself it obtains the value: the guesses could succeed.
    [*command, first.address, *map(str, [*guesses, first.number])],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert done.stdout.split() == [str(first.number)], done.stderr
  layout = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  there = channel.Channels('127.0.0.1')
  np.testing.assert_array_equal(there.unpack(second, layout), np.ones(1024))


def listening():
  """Addresses at which this process listens."""
  return {
    one.laddr
    for one in psutil.Process().net_connections('inet')
    if one.status == psutil.CONN_LISTEN
  }


def test_ports_are_opened_with_the_first_offer_and_on_one_interface(
  monkeypatch,
):
  monkeypatch.setattr(channel, 'SMALL', 1)
  before = listening()
  ends = channel.Channels('127.0.0.1')
  assert listening() == before
  offers(ends, 1)
  opened = listening() - before
  assert opened and {at.ip for at in opened} == {'127.0.0.1'}


class Intruder(threading.Thread):
  """Connects to streams, again and again, with the numbers that come next."""

  def __init__(self):
    super().__init__(daemon=True)
    self.addresses, self.stopped = (), False
    self.taken = collections.deque(maxlen=200)

  def run(self):
    while not self.stopped:
      time.sleep(0)
      for at in self.addresses:
        for number in range(channel.STREAMS):
          one = socket.create_connection(at)
          one.sendall(struct.pack('<Q', number))
          self.taken.append(one)


def check_connections(intruder, attempts):
  """Has a process connect to new servers; yields what it says of each."""
  victim = subprocess.Popen(
    [sys.executable, '-m', 'tests.rlinf_jax.runtime.ray.victim'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  for _ in range(attempts):
    before, ends = listening(), channel.Channels('127.0.0.1')
    probes = ends.probes()
    host, port = probes[0].offer.address.rsplit(':', 1)
    streams = listening() - before - {(host, int(port))}
    assert len(streams) == channel.STREAMS
    if intruder:
      intruder.addresses = streams
    pickle.dump(probes, victim.stdin)
    victim.stdin.flush()
    yield victim.stdout.readline().decode().strip()
  pickle.dump([], victim.stdin)
  victim.stdin.close()
  assert victim.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_stream_that_another_process_takes_is_noticed():
  assert list(check_connections(None, 2)) == ['checked'] * 2
  intruder = Intruder()
  intruder.start()
  try:  # It does not win every race.
    said = check_connections(intruder, 50)
    assert any('may have taken one of its streams' in line for line in said)
  finally:
    intruder.stopped = True
    intruder.join()


def test_the_transport_depends_on_size_and_type():
  key = jax.random.split(jax.random.key(0), 1 << 18)
  plain = np.dtype('float32')
  assert channel.transport(plain, 100, False) == 'in calls'
  assert channel.transport(plain, channel.SMALL, False) == 'device to device'
  assert channel.transport(plain, channel.SMALL, True) == 'by shared memory'
  assert (
    channel.transport(key.dtype, channel.SMALL, False) == 'by the object store'
  )
  assert (
    channel.transport(plain, channel.SMALL, False, True)
    == 'by the object store'
  )
  assert channel.size(serialize.pack(np.zeros((3, 4), np.float32))) == 48
