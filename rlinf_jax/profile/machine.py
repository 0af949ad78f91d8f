"""This machine as a cluster: what its devices and links reach, measured.

Devices of a CPU share its cores and its memory. What each of them reaches is
therefore measured while as many are busy as there are cores, and divided among
the rest; so is every stage.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from planner import cluster as cluster_lib
from rlinf_jax.profile import clock
from rlinf_jax.profile import store as store_lib

TYPES = ('float32', 'bfloat16')
TURNS = 64  # Of a loop: the cost of its beginning vanishes.
SMALL, LARGE = 1 << 10, 1 << 25  # Bytes that are moved.
RESERVE = 0.2  # Of memory: other processes live here too.


def busy() -> int:
  """Devices that measure at once: as many as keep a shared processor busy."""
  devices = jax.devices()
  if devices[0].platform != 'cpu':
    return 1
  return min(len(devices), len(os.sched_getaffinity(0)))


def shared() -> float:
  """Seconds of a call if all devices are busy, by those if `busy()` are."""
  devices = jax.devices()
  return len(devices) / busy() if devices[0].platform == 'cpu' else 1.0


def here(store: store_lib.Store) -> cluster_lib.Cluster:
  """The devices of this process, measured or remembered."""
  what = {'what': 'machine', 'busy': busy()}
  known = store.get(what)
  if known is None:
    known = _measure()
    store.put(what, known)
  n = len(jax.devices())
  device = cluster_lib.Device(
    jax.devices()[0].device_kind, memory=memory(), **known['device']
  )
  link = cluster_lib.Link(**known['link'])
  return cluster_lib.Cluster(device, n, n, link, link, RESERVE)


def memory() -> float:
  """Bytes of a device; devices of a CPU have equal shares of it."""
  stats = jax.devices()[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    return float(stats['bytes_limit'])
  there = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return there / len(jax.devices())


def _measure() -> dict:
  devices = jax.devices()
  some = devices[: busy()]
  n = 1024 if devices[0].platform == 'cpu' else 8192
  large = np.zeros(LARGE // 4, np.float32)
  copy = jax.jit(lambda x: x + 1)
  flops = {
    t: 2 * n**3 / _all(some, _product, np.ones((n, n), t)) for t in TYPES
  }
  arithmetic = 2 * TURNS * 2**16
  launch = _all(some, copy, np.zeros(1, np.float32))
  loop = _all(some, _loop, np.eye(8, dtype=np.float32))
  device = {
    'flops': flops,
    'vector': arithmetic / _all(some, _arithmetic, large[: 2**16]),
    'bandwidth': 2 * LARGE / _all(some, copy, large),
    'host': LARGE / _from_host(some, large),
    'launch': launch,
    'kernel': loop / TURNS,
  }
  return {'device': device, 'link': _link(devices, device)}


def _all(devices, fn, x) -> float:
  """Seconds of `fn(x)`, on every device at once."""
  args = [jax.device_put(x, device) for device in devices]
  (spent,) = clock.seconds([[functools.partial(fn, arg) for arg in args]])
  return spent * shared()


@jax.jit
def _product(x):
  return x @ x


@jax.jit
def _arithmetic(x):
  for _ in range(TURNS):
    x = x * 1.0001 + 0.5
  return x


@jax.jit
def _loop(x):
  return jax.lax.fori_loop(0, TURNS, lambda _, y: jnp.tanh(y @ y), x)


def _from_host(devices, x) -> float:
  """Seconds until a device has an array of the host, every one at once."""

  def put(device):
    return jax.device_put(x.copy(), device)

  calls = [functools.partial(put, device) for device in devices]
  (spent,) = clock.seconds([calls])
  return spent * shared()


def _link(devices, device) -> dict[str, float]:
  """Between two devices; with one there is nobody to talk to."""
  if len(devices) == 1:
    return {'latency': device['launch'], 'bandwidth': device['bandwidth']}

  def move(size):
    x = jax.device_put(np.zeros(size // 4, np.float32), devices[0])
    (spent,) = clock.seconds([[lambda: jax.device_put(x, devices[1])]])
    return spent

  latency = move(SMALL)
  rest = max(move(LARGE) - latency, 1e-9)
  return {'latency': latency, 'bandwidth': LARGE / rest}
