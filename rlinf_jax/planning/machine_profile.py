"""This machine as a cluster: what its devices and links reach, measured.

Devices of a CPU share its cores and its memory. What one of them reaches is
measured while the others have nothing to do, and so is every stage; then as
many as there are cores do the same at once, which tells how they slow each
other down.
"""

import functools
import os
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from planner import cluster as cluster_lib
from rlinf_jax.planning import call_timing
from rlinf_jax.planning import profile_store as profile_store_lib

TYPES = ('float32', 'bfloat16')
TURNS = 64  # Of a loop: the cost of its beginning vanishes.
SMALL, LARGE = 1 << 10, 1 << 25  # Bytes that are moved.
RESERVE = 0.2  # Of memory: other processes live here too.


def cores() -> int | None:
  """Of the processor that devices are shares of; None where they are not."""
  if jax.devices()[0].platform != 'cpu':
    return None
  return len(os.sched_getaffinity(0))


def crowd() -> int:
  """Devices that are busy where every core of a shared processor is."""
  return min(len(jax.devices()), cores() or 1)


def slowdown(alone: float, together: float | None = None) -> float | None:
  """How many times as long a call takes in a crowd; None without one."""
  return together and max(1.0, together / alone)


def here(store: profile_store_lib.Store) -> cluster_lib.Cluster:
  """The devices of this process, measured or remembered."""
  what = {'what': 'machine', 'crowd': crowd()}
  known = store.get(what)
  if known is None:
    known = _measure()
    store.put(what, known)
  n = len(jax.devices())
  device = cluster_lib.Device(
    jax.devices()[0].device_kind, memory=memory(), **known['device']
  )
  link = cluster_lib.Link(**known['link'])
  return cluster_lib.Cluster(
    *(device, n, n, link, link, RESERVE),
    cores=cores() and crowd(),  # Others have no device to be busy with.
    crowded=known['crowded'],
  )


def memory() -> float:
  """Bytes of a device; devices of a CPU have equal shares of it."""
  stats = jax.devices()[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    return float(stats['bytes_limit'])
  there = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return there / len(jax.devices())


def _measure() -> dict:
  devices = jax.devices()
  n = 1024 if devices[0].platform == 'cpu' else 8192
  large = np.zeros(LARGE // 4, np.float32)
  copy = jax.jit(lambda x: x + 1)
  products = {t: _took(_product, np.ones((n, n), t)) for t in TYPES}
  moved = _took(copy, large)
  arithmetic = 2 * TURNS * 2**16
  device = {
    'flops': {t: 2 * n**3 / took[0] for t, took in products.items()},
    'vector': arithmetic / _took(_arithmetic, large[: 2**16])[0],
    'bandwidth': 2 * LARGE / moved[0],
    'host': LARGE / _from_host(devices[0], large),
    'launch': _took(copy, np.zeros(1, np.float32))[0],
    'kernel': _took(_loop, np.eye(8, dtype=np.float32))[0] / TURNS,
  }
  both = [slowdown(*took) or 1.0 for took in (products[TYPES[0]], moved)]
  return {
    'device': device,
    'link': _link(devices, device),
    'crowded': statistics.fmean(both),  # Of arithmetic, and of traffic.
  }


def _took(fn, x) -> list[float]:
  """Seconds of `fn(x)` on one device, then on a crowd of them at once."""
  args = [jax.device_put(x, device) for device in jax.devices()[: crowd()]]
  calls = [functools.partial(fn, arg) for arg in args]
  return call_timing.seconds([calls[:1], calls][: len(calls)])


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


def _from_host(device, x) -> float:
  """Seconds until a device has an array of the host."""
  (spent,) = call_timing.seconds([[lambda: jax.device_put(x.copy(), device)]])
  return spent


def _link(devices, device) -> dict[str, float]:
  """Between two devices; with one there is nobody to talk to."""
  if len(devices) == 1:
    return {'latency': device['launch'], 'bandwidth': device['bandwidth']}

  def move(size):
    x = jax.device_put(np.zeros(size // 4, np.float32), devices[0])
    (spent,) = call_timing.seconds([[lambda: jax.device_put(x, devices[1])]])
    return spent

  latency = move(SMALL)
  rest = max(move(LARGE) - latency, 1e-9)
  return {'latency': latency, 'bandwidth': LARGE / rest}
