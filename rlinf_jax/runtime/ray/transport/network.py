"""The network interface on which the processes of a run listen.

Nothing that processes send each other is encrypted, and `jax.distributed` and
the collectives of JAX's CPU devices know no passwords. Processes listen on one
interface each: the loopback interface if all are on one machine.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import ipaddress
import socket
import struct

from jax._src import distributed, xla_bridge
from jax._src.lib import _jax
import ray
from ray._private import ray_constants

LOOPBACK = 'lo'
SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface.


def address(interface: str | None) -> str:
  """The address of this machine at which a process listens.

  Args:
    interface: name of a network interface; None for the one that Ray uses.

  Raises:
    ValueError: if this machine has no such interface, or it has no IPv4
      address.
  """
  if interface is None:
    return ray.util.get_node_ip_address()
  request = struct.pack('256s', interface.encode())
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    except OSError:
      names = [name for _, name in socket.if_nameindex()]
      raise ValueError(
        f'{socket.gethostname()} has no network interface {interface!r} with '
        f'an IPv4 address: set `network_interface` to one of {names}.'
      ) from None
  return socket.inet_ntoa(answer[20:24])


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
  """Has a Ray that is started meanwhile listen on the loopback interface.

  On Linux it would listen on every interface, and has no argument for it.
  """
  before = ray_constants.ENABLE_RAY_CLUSTER
  ray_constants.ENABLE_RAY_CLUSTER = False  # As Ray does on other systems.
  try:
    yield
  finally:
    ray_constants.ENABLE_RAY_CLUSTER = before


def with_port(address: str, port: int) -> str:
  """An address and a port in one string."""
  if family(address) == socket.AF_INET6:
    address = f'[{address}]'
  return f'{address}:{port}'


def family(address: str) -> socket.AddressFamily:
  """The family of an address: IPv4 or IPv6."""
  is_ipv6 = ipaddress.ip_address(address).version == 6
  return socket.AF_INET6 if is_ipv6 else socket.AF_INET


def free_port(address: str) -> int:
  """A port that is free at an address of this machine."""
  with socket.socket(family(address)) as free:
    free.bind((address, 0))
    return free.getsockname()[1]


def bind_cpu_collectives(address: str):
  """Has the collectives of JAX's CPU devices listen at one address.

  Without it they listen at the address of the machine's name. JAX has no
  setting for it. Call this before JAX starts its devices.

  Args:
    address: of this machine.
  """

  def make_client():
    collectives = _jax.make_gloo_tcp_collectives(
      distributed_client=distributed.global_state.client, hostname=address
    )
    return xla_bridge.make_cpu_client(collectives)

  xla_bridge.register_backend_factory(
    'cpu', make_client, priority=0, fail_quietly=False
  )
