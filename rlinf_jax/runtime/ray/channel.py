"""Transports of values between processes, chosen by what is sent.

- Small values travel in the call that announces them.
- Large values between processors of one machine go through shared memory,
  which is Ray's object store: seven times faster than pulling
  (`experiments.links`).
- Other large values are offered, and the receiver pulls them from device to
  device (`jax.experimental.transfer`).
- Random keys go through the object store from anywhere, as do values that
  several processes read, since each of them takes its own shards.

Every process that reaches the port of an offer may pull it, if it knows the
number of the offer. Numbers are therefore secrets: each is random and used for
one offer, and only Ray carries it, from the sender to the receiver.

The streams of a connection have small numbers, which can be guessed: another
process that reaches the port may take a stream just before the receiver does,
and would be sent values. The receiver therefore pulls `probes` over a new
connection before anything else; they do not arrive if a stream is lost.
"""

from collections.abc import Sequence
import math
import secrets
import threading
import time
from typing import NamedTuple

import jax
from jax.experimental import transfer
import jax.numpy as jnp
import numpy as np

from rlinf_jax.runtime.ray import network, serialize
from sharding import multihost

SMALL = 1 << 20  # Bytes: below, a pull takes longer than a copy.
STREAMS = 2  # Connections per pair of servers: one does not fill a link.
PROBES = 2 * STREAMS  # Streams take turns, so that each carries two.
SETTLED = 0.05  # Seconds in which both ends of a stream have accepted it.
PROBE_TIMEOUT = 30.0  # Seconds until a probe has arrived.


class Offer(NamedTuple):
  """A value that can be pulled, once.

  Attributes:
    address: of the server that offers it.
    number: of the offer, 64 random bits.
    shape: of the value.
    dtype: its name.
    axes: mesh axes, if it is to be pulled shard by shard; else empty.
  """

  address: str
  number: int
  shape: tuple[int, ...]
  dtype: str
  axes: tuple


class Probe(NamedTuple):
  """A random value by which a new connection is checked.

  Attributes:
    offer: of the value.
    value: its bytes, which Ray carries.
  """

  offer: Offer
  value: bytes


class Channels:
  """This process's ends of all channels to and from other processes.

  Offered arrays must not be overwritten until they are pulled. This keeps
  references to them, and `wait_until_pulled` blocks for them.

  Ports are opened with the first value that is pulled, so that a run in which
  none is pulled listens on no port.
  """

  def __init__(self, address: str):
    """Opens no port yet.

    Args:
      address: the one by which other processes reach this one.
    """
    self._address = address
    self._started = None  # The server that values are pulled from.
    self._connections = {}  # By address.
    # Arrays that share the offered memory, by number of the offer.
    self._offered: dict[int, tuple[jax.Array | None, ...]] = {}
    self._changed = threading.Condition()
    self._start_lock = threading.Lock()

  @property
  def _server(self) -> transfer.TransferServer:
    with self._start_lock:
      if self._started is None:
        client = jax.local_devices()[0].client
        at = network.with_port(self._address, 0)
        self._started = transfer.start_transfer_server(
          client, at, [at] * STREAMS
        )
      return self._started

  def pack(
    self,
    x: jax.Array,
    axes: tuple,
    same_machine: bool,
    several_readers: bool = False,
    base: jax.Array | None = None,
  ) -> serialize.Serialized | Offer:
    """A value in the form in which it is sent.

    Args:
      x: the value.
      axes: mesh axes, if both ends have the same; else empty, as their shards
        would not match.
      same_machine: whether both ends are processors of one machine.
      several_readers: whether several processes read it.
      base: the array whose memory `x` is a view of, if any.
    """
    how = transport(x.dtype, x.nbytes, same_machine, several_readers)
    if how != 'device to device':
      return serialize.pack(x)
    offered = x
    if not axes:
      offered = jax.device_put(x, next(iter(x.sharding.device_set)))
    number = secrets.randbits(64)
    with self._changed:
      self._offered[number] = (x, offered, base)
    return self._offer(number, offered, axes)

  def _offer(self, number, x, axes) -> Offer:
    self._server.await_pull(number, [jax.block_until_ready(x)])
    address = self._server.address()
    return Offer(address, number, x.shape, x.dtype.name, axes)

  def probes(self) -> list[Probe]:
    """Offers values for the check of a new connection to this process."""
    values = [secrets.token_bytes(32) for _ in range(PROBES)]
    arrays = [jnp.asarray(np.frombuffer(x, np.uint8)) for x in values]
    return [
      Probe(self._offer(secrets.randbits(64), x, ()), value)
      for x, value in zip(arrays, values, strict=True)
    ]

  def is_connected(self, address: str) -> bool:
    """Whether values were pulled from an address before."""
    return address in self._connections

  def check(self, probes: Sequence[Probe]):
    """Checks that all streams of a new connection lead to the sender.

    Args:
      probes: of the sender.

    Raises:
      RuntimeError: if one does not.
    """
    layout = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for offer, value in probes:
      x = self.unpack(offer, layout)
      time.sleep(SETTLED)
      deadline = time.monotonic() + PROBE_TIMEOUT
      while not x.is_ready() and time.monotonic() < deadline:
        time.sleep(0.001)
      if not x.is_ready() or _bytes(x) != value:
        del self._connections[offer.address]
        raise RuntimeError(
          f'The connection to {offer.address} does not carry what was sent: '
          'another process may have taken one of its streams. Run in a network '
          'that only the machines of the cluster reach.'
        )

  def mark_pulled(self, number: int):
    """Drops an offer that the receiver has pulled."""
    with self._changed:
      self._offered.pop(number, None)
      self._changed.notify_all()

  def wait_until_pulled(
    self, arrays: Sequence[jax.Array], seconds: float | None
  ) -> bool:
    """Blocks until none of some arrays is offered.

    Args:
      arrays: that are about to be overwritten.
      seconds: to wait at most; None for no limit.

    Returns:
      False if some are still offered after that time.
    """

    def none_offered():
      offered = {id(x) for group in self._offered.values() for x in group}
      return not any(id(x) in offered for x in arrays)

    with self._changed:
      return self._changed.wait_for(none_offered, seconds)

  def cancel_offers(self):
    """Drops all offers: their receivers have failed or start afresh."""
    with self._changed:
      self._offered.clear()
      self._changed.notify_all()

  def unpack(self, sent: serialize.Serialized | Offer, layout) -> jax.Array:
    """A received value with some sharding; pulls it if it was offered.

    Args:
      sent: as received.
      layout: the sharding.
    """
    if isinstance(sent, serialize.Serialized):
      # The object store owns this memory: the array must not alias it.
      return multihost.put(serialize.unpack(sent), layout, may_alias=False)
    connection = self._connections.get(sent.address)
    if connection is None:
      connection = self._server.connect(sent.address)
      self._connections[sent.address] = connection
    pulled_to = layout
    if not sent.axes:
      device = min(layout.device_set, key=lambda device: device.id)
      pulled_to = jax.sharding.SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct(
      sent.shape, jnp.dtype(sent.dtype), sharding=pulled_to
    )
    (x,) = connection.pull(sent.number, [shape])
    return jax.device_put(x, layout)


def _bytes(x: jax.Array) -> bytes | None:
  """The bytes of an array that was pulled; None if that has failed."""
  try:
    return np.asarray(x).tobytes()
  except jax.errors.JaxRuntimeError:
    return None


def size(sent: serialize.Serialized | Offer) -> int:
  """Bytes of a value that is sent."""
  if isinstance(sent, serialize.Serialized):
    return sent.data.nbytes
  return math.prod(sent.shape) * jnp.dtype(sent.dtype).itemsize


def transport(
  dtype, size: int, same_machine: bool, several_readers: bool = False
) -> str:
  """Names the transport of a value.

  Args:
    dtype: its type.
    size: its bytes.
    same_machine: whether both ends are processors of one machine.
    several_readers: whether several processes read it.
  """
  if size < SMALL:
    return 'in calls'
  if same_machine:
    return 'by shared memory'
  if several_readers or jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return 'by the object store'
  return 'device to device'
