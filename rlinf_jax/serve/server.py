"""A server in a thread, for programs that start their agents themselves."""

import ipaddress
import socket
import threading

import uvicorn

from rlinf_jax.serve import endpoint as endpoint_lib

BACKLOG = 2048  # Connections that wait.
KEEP_ALIVE = 60  # Seconds between the requests of a connection.


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens.

  Raises:
    OSError: if the port is taken, or the address is not of this machine.
    ValueError: if the host is empty, which would mean every interface.
  """
  if not host:
    raise ValueError(
      'The host is empty: give an address, or 0.0.0.0 for every interface.'
    )
  is_v6 = ':' in host
  listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    listener.bind((host, port))
    listener.listen(BACKLOG)  # Clients may connect before the server runs.
  except OSError as error:
    listener.close()
    raise OSError(
      f'The endpoint cannot listen on port {port} of {host} '
      f'({error.strerror}): choose another port, or an address of this machine.'
    ) from error
  return listener


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def config(endpoint: endpoint_lib.Endpoint) -> uvicorn.Config:
  """Settings of uvicorn: no log of requests, and no header with its name."""
  return uvicorn.Config(
    endpoint.app,
    log_level='error',
    access_log=False,
    server_header=False,
    timeout_keep_alive=KEEP_ALIVE,
    timeout_graceful_shutdown=5,
    lifespan='off',
  )


class Server:
  """Serves an endpoint in a thread, until the end of a `with` block.

  Attributes:
    url: base URL for clients, which ends in `/v1`.
  """

  def __init__(
    self,
    endpoint: endpoint_lib.Endpoint,
    listener: socket.socket | None = None,
  ):
    """Serves no request yet.

    Args:
      endpoint: what is served.
      listener: as `listen`, which this closes; by default on a free port of the
        loopback interface.
    """
    self._listener = listener or listen('127.0.0.1', 0)
    host, port = self._listener.getsockname()[:2]
    name = f'[{host}]' if ':' in host else host
    self.url = f'http://{name}:{port}/v1'
    self._server = uvicorn.Server(config(endpoint))
    self._thread = threading.Thread(
      target=self._server.run, args=([self._listener],), daemon=True
    )

  def __enter__(self) -> 'Server':
    self._thread.start()
    return self

  def wait(self):
    """Waits until the server ends, as by an interrupt."""
    while self._thread.is_alive():
      self._thread.join(1.0)

  def __exit__(self, *_):
    self._server.should_exit = True
    self._thread.join()
    self._listener.close()
