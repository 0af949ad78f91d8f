"""Measures the rates of this machine's devices and links, as a cluster.

Devices of a CPU share its cores and its memory. The rates of one device, and
the seconds of every stage, are measured while the other devices are idle. The
same is then measured on as many devices at once as there are cores, which shows
how much they slow each other down.
"""

import functools
import inspect
import os
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from planner import cluster as cluster_lib
from rlinf_jax.planning.profiling import call_timing
from rlinf_jax.planning.profiling import profile_store as profile_store_lib
from sharding import offload

TYPES = ('float32', 'bfloat16')
TRIPS = 64  # Of a loop, so that the cost of its launch vanishes.
SMALL, LARGE = 1 << 10, 1 << 25  # Bytes of transfers.
ARRAYS = 16  # Small ones that move at once.
RESERVE = 0.2  # Of a host's memory, for other processes.
# Of an accelerator's memory, for gaps between arrays.
FRAGMENTED = 0.05


def cores() -> int | None:
  """Returns the cores that CPU devices share; None for other devices."""
  if jax.devices()[0].platform != 'cpu':
    return None
  return len(os.sched_getaffinity(0))


def busy_devices() -> int:
  """Returns how many devices keep every shared core busy."""
  return min(len(jax.devices()), cores() or 1)


def slowdown(alone: float, together: float | None = None) -> float | None:
  """Returns how many times as long a call takes on all cores at once.

  None where devices share no cores.
  """
  return together and max(1.0, together / alone)


def measure_cluster(store: profile_store_lib.Store) -> cluster_lib.Cluster:
  """Measures the devices of this process, or reads an earlier measurement."""
  what = {
    'what': 'machine',
    # Another version may measure other numbers.
    'program': inspect.getsource(sys.modules[__name__]),
    'busy_devices': busy_devices(),
  }
  known = store.get(what)
  if known is None:
    known = _measure()
    store.put(what, known)
  n = len(jax.devices())
  device = cluster_lib.Device(
    jax.devices()[0].device_kind, memory_bytes=memory(), **known['device']
  )
  link = cluster_lib.Link(**known['link'])
  return cluster_lib.Cluster(
    device,
    num_devices=n,
    devices_per_node=n,
    intra_node=link,
    inter_node=link,
    memory_reserve=RESERVE if _is_host() else FRAGMENTED,
    shared_cores=cores() and busy_devices(),  # Other cores have no device.
    contention=known['contention'],
  )


def _is_host() -> bool:
  """Whether the devices are processors, which share their host's memory."""
  return jax.devices()[0].platform == 'cpu'


def memory() -> float:
  """Returns the bytes of a device; those of a CPU have equal shares of it."""
  stats = jax.devices()[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    return float(stats['bytes_limit'])
  total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return total / len(jax.devices())


def _measure() -> dict:
  devices = jax.devices()
  n = 1024 if devices[0].platform == 'cpu' else 8192
  large = np.zeros(LARGE // 4, np.float32)
  copy = jax.jit(lambda x: x + 1)
  products = {t: _took(_product, np.ones((n, n), t)) for t in TYPES}
  moved = _took(copy, large)
  arithmetic = 2 * TRIPS * 2**16
  latency, to_host = _host_moves(devices[0])
  device = {
    'matmul_flops': {t: 2 * n**3 / took[0] for t, took in products.items()},
    'vector_flops': arithmetic / _took(_arithmetic, large[: 2**16])[0],
    'memory_bandwidth': 2 * LARGE / moved[0],
    'host_latency_seconds': latency,
    'host_bandwidth': to_host,
    'launch_seconds': _took(copy, np.zeros(1, np.float32))[0],
    'kernel_gap_seconds': _took(_loop, np.eye(8, dtype=np.float32))[0] / TRIPS,
  }
  both = [slowdown(*took) or 1.0 for took in (products[TYPES[0]], moved)]
  return {
    'device': device,
    'link': _link(devices, device),
    'contention': statistics.fmean(both),  # Of arithmetic and of traffic.
  }


def _took(fn, x) -> list[float]:
  """Returns seconds of `fn(x)` on one device, then on all cores at once."""
  args = [
    jax.device_put(x, device) for device in jax.devices()[: busy_devices()]
  ]
  calls = [functools.partial(fn, arg) for arg in args]
  return call_timing.seconds([calls[:1], calls][: len(calls)])


@jax.jit
def _product(x):
  return x @ x


@jax.jit
def _arithmetic(x):
  for _ in range(TRIPS):
    x = x * 1.0001 + 0.5
  return x


@jax.jit
def _loop(x):
  return jax.lax.fori_loop(0, TRIPS, lambda _, y: jnp.tanh(y @ y), x)


def _host_moves(device) -> tuple[float, float]:
  """Measures moves between a device and the host's memory, as a run's.

  Returns:
    Seconds of a small array, and bytes per second of a large one.
  """

  def move(arrays, size):
    there = [
      jax.device_put(np.zeros(size // 4, np.float32), device)
      for _ in range(arrays)
    ]
    ways = lambda: offload.to_device(offload.to_host(there))
    (spent,) = call_timing.seconds([[ways]])
    return spent / 2 / arrays

  latency = move(ARRAYS, SMALL)
  return latency, LARGE / max(move(1, LARGE) - latency, 1e-9)


def _link(devices, device) -> dict[str, float]:
  """Measures the link between two devices; one device is its own peer."""
  if len(devices) == 1:
    return {
      'latency_seconds': device['launch_seconds'],
      'bandwidth': device['memory_bandwidth'],
    }

  def move(size):
    x = jax.device_put(np.zeros(size // 4, np.float32), devices[0])
    (spent,) = call_timing.seconds([[lambda: jax.device_put(x, devices[1])]])
    return spent

  latency = move(SMALL)
  rest = max(move(LARGE) - latency, 1e-9)
  return {'latency_seconds': latency, 'bandwidth': LARGE / rest}
