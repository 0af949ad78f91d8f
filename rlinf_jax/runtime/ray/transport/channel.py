"""Transports of values between processes, chosen by what is sent.

- Small values travel in the call that announces them.
- Large values between processors of one machine go through shared memory, which
  is Ray's object store (`experiments.links`).
- Other large values are offered, and the receiver pulls them through a
  connection of its own (`offers`).
- Random keys go through the object store from anywhere, as do values that
  several processes read, since each of them takes its own shards.
"""

from collections.abc import Callable, Sequence
import math
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlinf_jax.runtime.ray.transport import offers, serialize
from sharding import multihost

SMALL = 1 << 20  # Bytes: below, a pull takes longer than a copy.


class Offer(NamedTuple):
  """A value that can be pulled, once.

  Attributes:
    ticket: by which it is pulled.
    shape: of the value.
    dtype: its name.
  """

  ticket: offers.Ticket
  shape: tuple[int, ...]
  dtype: str


class Channels:
  """This process's ends of all channels to and from other processes.

  Offered arrays must not be overwritten until they are pulled. This keeps
  references to them, and `wait_until_pulled` blocks for them.

  A port is opened with the first value that is offered, so that a run in which
  none is pulled listens on no port.
  """

  def __init__(self, address: str):
    """Opens no port yet.

    Args:
      address: the one by which other processes reach this one.
    """
    self._address = address
    self._started = None  # The server that values are pulled from.
    # Arrays that share the memory of offered values.
    self._offered: list[tuple[jax.Array | None, ...]] = []
    self._changed = threading.Condition()
    self._start_lock = threading.Lock()

  @property
  def _server(self) -> offers.Server:
    with self._start_lock:
      if self._started is None:
        self._started = offers.Server(self._address)
      return self._started

  def pack(
    self,
    x: jax.Array,
    same_machine: bool,
    several_readers: bool = False,
    base: jax.Array | None = None,
  ) -> serialize.Serialized | Offer:
    """A value in the form in which it is sent.

    Args:
      x: the value.
      same_machine: whether both ends are processors of one machine.
      several_readers: whether several processes read it.
      base: the array whose memory `x` is a view of, if any.
    """
    how = transport(x.dtype, x.nbytes, same_machine, several_readers)
    if how != 'by a connection':
      return serialize.pack(x)
    x.copy_to_host_async()
    kept = x, base
    with self._changed:
      self._offered.append(kept)

    def send(write: Callable[[memoryview], None]):
      try:
        data = np.ascontiguousarray(serialize.pack(x).data)
        write(memoryview(data.reshape(-1).view(np.uint8)))
      finally:
        self._release(kept)

    return Offer(self._server.offer(send), x.shape, x.dtype.name)

  def _release(self, kept: tuple[jax.Array | None, ...]):
    """Lets the arrays of an offer be overwritten."""
    with self._changed:
      self._offered = [x for x in self._offered if x is not kept]
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
      offered = {id(x) for group in self._offered for x in group}
      return not any(id(x) in offered for x in arrays)

    with self._changed:
      return self._changed.wait_for(none_offered, seconds)

  def cancel_offers(self):
    """Withdraws all offers: their receivers have failed or start afresh."""
    if self._started:
      self._started.cancel()
    with self._changed:
      self._offered.clear()
      self._changed.notify_all()

  def unpack(self, sent: serialize.Serialized | Offer, layout) -> jax.Array:
    """A received value with some sharding; pulls it if it was offered.

    Args:
      sent: as received.
      layout: the sharding.

    Raises:
      ConnectionError: if it cannot be pulled.
    """
    if isinstance(sent, serialize.Serialized):
      # The object store owns this memory: the array must not alias it.
      return multihost.put(serialize.unpack(sent), layout, may_alias=False)
    data = offers.pull(sent.ticket, size(sent))
    return multihost.put(
      data.view(jnp.dtype(sent.dtype)).reshape(sent.shape), layout
    )


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
  return 'by a connection'
