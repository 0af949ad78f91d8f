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
    OSError: if the port is taken.
  """
  is_v6 = ':' in host
  listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  listener.bind((host, port))
  listener.listen(BACKLOG)  # Clients may connect before the server runs.
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
    host: str = '127.0.0.1',
    port: int = 0,
  ):
    """Listens, on a port that the system chooses for 0."""
    self._listener = listen(host, port)
    name = f'[{host}]' if ':' in host else host
    self.url = f'http://{name}:{self._listener.getsockname()[1]}/v1'
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
