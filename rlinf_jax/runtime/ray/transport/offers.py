"""Values that a process offers, and that another one pulls by a connection.

Ray carries a `Ticket` from the sender of a value to its receiver. The receiver
connects, and presents the ticket's number; the sender answers with its proof
and the value's bytes, once. A connection that presents something else, or
nothing, is closed, and costs a thread for `PATIENCE` seconds at most.

Numbers and proofs are 128 random bits each. They admit and encrypt nothing
else: a process that reads the network's traffic reads the values.
"""

import collections
from collections.abc import Callable
import contextlib
import hmac
import secrets
import socket
import threading
import time
from typing import NamedTuple

import numpy as np

from rlinf_jax.runtime.ray.transport import network

BYTES = 16  # Of a number, and of a proof.
PATIENCE = 10.0  # Seconds in which a connection must present a ticket.
STRANGERS = 64  # Connections that have not; then the oldest is closed.
ATTEMPTS = 3  # To connect: a crowd of strangers may push a receiver out.
ALIGNMENT = 64  # Bytes: JAX takes over memory that is aligned so.
# Of connections whose other machine is silent: an error after half a minute.
KEEPALIVE = {
  socket.TCP_KEEPIDLE: 15,
  socket.TCP_KEEPINTVL: 5,
  socket.TCP_KEEPCNT: 3,
}


class Ticket(NamedTuple):
  """Address and secret by which a receiver pulls a value.

  Attributes:
    host: address of the server that offers it.
    port: of that server.
    number: which the receiver presents.
    proof: with which the server's answer begins.
  """

  host: str
  port: int
  number: bytes
  proof: bytes


class Server:
  """Hands each offered value to the first connection that has its ticket."""

  def __init__(self, host: str):
    """Listens on a free port.

    Args:
      host: the address, by which other processes reach this one.
    """
    self._socket = socket.create_server(
      (host, 0), family=network.family(host), backlog=STRANGERS
    )
    self.host, self.port = self._socket.getsockname()[:2]
    self._offered: dict[bytes, tuple[bytes, Callable]] = {}
    self._strangers: collections.deque[socket.socket] = collections.deque()
    self._lock = threading.Lock()
    threading.Thread(target=self._accept, daemon=True).start()

  def offer(self, send: Callable[[Callable[[memoryview], None]], None]):
    """Offers a value; returns its ticket.

    Args:
      send: `write -> None`: writes the value's bytes. It is called in a thread,
        at most once.
    """
    number, proof = secrets.token_bytes(BYTES), secrets.token_bytes(BYTES)
    with self._lock:
      self._offered[number] = proof, send
    return Ticket(self.host, self.port, number, proof)

  def cancel(self):
    """Withdraws all offers."""
    with self._lock:
      self._offered.clear()

  def _accept(self):
    while True:
      try:
        connection, _ = self._socket.accept()
      except OSError:  # Such as too many open files.
        time.sleep(0.1)
        continue
      with self._lock:
        self._strangers.append(connection)
        oldest = None
        if len(self._strangers) > STRANGERS:
          oldest = self._strangers.popleft()
      if oldest:
        with contextlib.suppress(OSError):
          oldest.shutdown(socket.SHUT_RDWR)  # Wakes its thread, which closes.
      answer = threading.Thread(
        target=self._answer, args=(connection,), daemon=True
      )
      try:
        answer.start()
      except RuntimeError:  # Too many threads: its peer connects once more.
        self._forget(connection)
        connection.close()
        time.sleep(0.1)

  def _forget(self, stranger: socket.socket):
    with self._lock:
      with contextlib.suppress(ValueError):
        self._strangers.remove(stranger)

  def _answer(self, connection: socket.socket):
    """Sends a value to a connection that presents its number."""
    with connection, contextlib.suppress(OSError, EOFError):
      number = bytearray(BYTES)
      try:
        _fill(connection, number, time.monotonic() + PATIENCE)
      finally:
        self._forget(connection)
        with self._lock:
          offered = self._offered.pop(bytes(number), None)
      if offered:
        proof, send = offered
        _keep_alive(connection)
        connection.sendall(proof)
        send(connection.sendall)


def pull(ticket: Ticket, size: int) -> np.ndarray:
  """The bytes of a value that is offered, in memory of their own.

  Raises:
    ConnectionError: if they are not offered, or not by the process that issued
      the ticket, or the connection is lost.
  """
  where = f'{ticket.host} port {ticket.port}'
  for _ in range(ATTEMPTS):
    proof = bytearray(BYTES)
    try:
      connection = socket.create_connection(ticket[:2], PATIENCE)
    except OSError as error:
      raise ConnectionError(
        f'A value cannot be pulled from {where}: {error}.'
      ) from error
    with connection:
      try:
        _keep_alive(connection)
        connection.sendall(ticket.number)
        _fill(connection, proof)
      except (OSError, EOFError):
        continue  # It was closed before the value was taken.
      if not hmac.compare_digest(proof, ticket.proof):
        raise ConnectionError(
          f'Another process than the sender answers at {where}: run in a '
          'network that only the machines of the cluster reach.'
        )
      data = _aligned(size)
      try:
        _fill(connection, memoryview(data))
      except (OSError, EOFError) as error:
        raise ConnectionError(
          f'The connection to {where} was lost while a value of {size:,} bytes '
          f'came: {error}.'
        ) from error
      return data
  raise ConnectionError(
    f'The process at {where} does not offer a value any more that was to be '
    'pulled: it has failed, or was told to stop.'
  )


def _fill(
  connection: socket.socket, buffer, deadline: float | None = None
) -> None:
  """Receives until a buffer is full; EOFError if the connection ends before."""
  view = memoryview(buffer)
  while view:
    if deadline is not None:
      connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    n = connection.recv_into(view)
    if not n:
      raise EOFError('it ended early')
    view = view[n:]


def _keep_alive(connection: socket.socket):
  """Waits as long as the other machine answers, and no longer."""
  connection.settimeout(None)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for option, value in KEEPALIVE.items():
    connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _aligned(size: int) -> np.ndarray:
  """New memory that JAX can take over without a copy."""
  data = np.empty(size + ALIGNMENT, np.uint8)
  start = -data.ctypes.data % ALIGNMENT
  return data[start : start + size]
