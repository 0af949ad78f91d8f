"""Ways from one process to another, chosen by what goes.

- Small values travel in the call that announces them.
- Large ones between processors of one machine go by shared memory, which is
  Ray's object store: seven times faster than pulling (`experiments.links`).
- Others are offered, and the other process pulls them from device to device
  (`jax.experimental.transfer`).
- What is no plain numbers, such as keys, goes by the store from anywhere, and
  so does what several processes read, as each takes its own parts of it.
"""

from collections.abc import Sequence
import itertools
import math
import threading
from typing import NamedTuple

import jax
from jax.experimental import transfer
import jax.numpy as jnp

from rlinf_jax.runtime.ray import serialize
from sharding import span

SMALL = 1 << 20  # Bytes: below, a pull takes longer than a copy.
STREAMS = 2  # Connections a server opens to another: one does not fill a link.


class Offer(NamedTuple):
  """A value that waits to be pulled.

  Attributes:
    address: of the server that has it.
    number: of the offer; it can be pulled once.
    shape: of the value.
    dtype: by name.
    axes: of the mesh that it lies on, if it is to be pulled shard by shard.
  """

  address: str
  number: int
  shape: tuple[int, ...]
  dtype: str
  axes: tuple


class Channels:
  """The ends of links in this process."""

  def __init__(self, host: str):
    """Starts the server that values are pulled from.

    Args:
      host: the address by which other processes reach this one.
    """
    client = jax.local_devices()[0].client
    self._server = transfer.start_transfer_server(
      client, f'{host}:0', [f'{host}:0'] * STREAMS
    )
    self._numbers = itertools.count()
    self._peers = {}
    self._lent: dict[int, tuple[jax.Array, ...]] = {}  # By number of the offer.
    self._back = threading.Condition()

  def pack(
    self,
    x: jax.Array,
    axes: tuple,
    near: bool,
    shared: bool = False,
    own: jax.Array | None = None,
  ) -> serialize.Serialized | Offer:
    """A value in the form in which it goes.

    Args:
      x: the value.
      axes: of the mesh of both ends; empty where theirs differ, so that shards
        would not match, or where they have none.
      near: whether both ends are processors of one machine.
      shared: whether several processes read it.
      own: what it is a part of, if it is one: the same memory.
    """
    if transport(x.dtype, x.nbytes, near, shared) != 'device to device':
      return serialize.pack(x)
    number, sent = next(self._numbers), x
    if not axes:
      sent = jax.device_put(x, next(iter(x.sharding.device_set)))
    with self._back:
      self._lent[number] = (x, sent, own)
    self._server.await_pull(number, [jax.block_until_ready(sent)])
    where = self._server.address()
    return Offer(where, number, x.shape, x.dtype.name, axes)

  def pulled(self, number: int):
    """Takes note that an offer was pulled."""
    with self._back:
      self._lent.pop(number, None)
      self._back.notify_all()

  def settle(self, arrays: Sequence[jax.Array], seconds: float | None) -> bool:
    """Waits until arrays that will be overwritten are offered no more.

    Args:
      arrays: which.
      seconds: to wait at most.

    Returns:
      Whether that is so.
    """

    def settled():
      lent = {id(x) for pair in self._lent.values() for x in pair}
      return not any(id(x) in lent for x in arrays)

    with self._back:
      return self._back.wait_for(settled, seconds)

  def forget(self):
    """Gives up what is offered: nobody will pull it."""
    with self._back:
      self._lent.clear()
      self._back.notify_all()

  def unpack(self, sent: serialize.Serialized | Offer, layout) -> jax.Array:
    """The value, laid out.

    Args:
      sent: as it came.
      layout: that it shall have.
    """
    if isinstance(sent, serialize.Serialized):
      # Memory that the object store owns must not be taken for ours.
      return span.put(serialize.unpack(sent), layout, may_alias=False)
    peer = self._peers.get(sent.address)
    if peer is None:
      peer = self._peers[sent.address] = self._server.connect(sent.address)
    first = layout
    if not sent.axes:
      device = min(layout.device_set, key=lambda device: device.id)
      first = jax.sharding.SingleDeviceSharding(device)
    like = jax.ShapeDtypeStruct(
      sent.shape, jnp.dtype(sent.dtype), sharding=first
    )
    (x,) = peer.pull(sent.number, [like])
    return jax.device_put(x, layout)


def size(sent: serialize.Serialized | Offer) -> int:
  """Bytes of a value."""
  if isinstance(sent, serialize.Serialized):
    return sent.data.nbytes
  return math.prod(sent.shape) * jnp.dtype(sent.dtype).itemsize


def transport(dtype, size: int, near: bool, shared: bool = False) -> str:
  """How a value travels, in words."""
  if size < SMALL:
    return 'in calls'
  if near:
    return 'by shared memory'
  if shared or jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return 'by the object store'
  return 'device to device'
