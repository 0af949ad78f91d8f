"""The engines on the devices of a place, and the rows of each.

The mesh of a place says how many there are. The devices along axes over which
rows are sharded hold copies of the model, as `data` and `fsdp`; those along
other axes, as `tensor`, divide one copy.
"""

from collections.abc import Callable, Sequence, Set
from concurrent import futures
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from sharding import rules
from stages.models import transformer

VOCABULARY_MULTIPLE = 64  # vLLM pads vocabularies to it.


class Copies(NamedTuple):
  """The copies of a model on a place.

  Attributes:
    devices: for each copy, the numbers of the devices that divide it; none for
      the only device of a place that needs no number.
    processes: devices of the place if they are several, otherwise 0.
  """

  devices: tuple[tuple[int, ...], ...]
  processes: int


def copies(params: Any) -> Copies:
  """The copies of a model on the place that holds its parameters.

  Without parameters, as vLLM has read them itself, it is JAX's first device.

  Raises:
    ValueError: if another process holds some of the place's devices.
  """
  if params is None:
    return Copies((tuple(map(_number, _accelerators(jax.devices()[:1]))),), 0)
  sharding = getattr(jax.tree.leaves(params)[0], 'sharding', None)
  mesh = getattr(sharding, 'mesh', None)
  if mesh is None or mesh.size == 1:
    devices = sharding.device_set if sharding else ()
    return Copies((tuple(map(_number, _accelerators(devices))),), 0)
  elsewhere = [d for d in mesh.devices.flat if d not in jax.local_devices()]
  if elsewhere:
    raise ValueError(
      f'vLLM generates on a place of {mesh.size} devices, and {len(elsewhere)} '
      f'of them belong to other processes, such as {elsewhere[0]}: give the '
      'stage a place whose devices are of one process.'
    )
  of_rows = [a for a in mesh.axis_names if a in rules.DEFAULT['B']]
  first = [mesh.axis_names.index(axis) for axis in of_rows]
  device_RT = np.moveaxis(mesh.devices, first, range(len(first))).reshape(
    int(np.prod([mesh.shape[axis] for axis in of_rows], dtype=int)), -1
  )
  return Copies(
    tuple(tuple(map(_number, device_T)) for device_T in device_RT), mesh.size
  )


def _accelerators(devices):
  return [d for d in devices if d.platform != 'cpu']


def _number(device) -> int:
  """The number by which vLLM knows a device of this machine."""
  return device.id if device.platform == 'cpu' else device.local_hardware_id


def ranks(config: transformer.Config) -> tuple[int, ...]:
  """The numbers of devices that may divide one copy of a model in vLLM.

  They divide heads of queries, hidden units and the padded vocabulary evenly;
  heads of keys and values are divided, or copied where they are fewer.
  """
  padded = -(-config.V // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
  return tuple(
    n
    for n in range(1, config.H + 1)
    if not (config.H % n or config.F % n or padded % n)
    and not (config.K % n and n % config.K)
  )


def parts(rows: int, group_size: int, engines: int) -> list[slice]:
  """The rows of each engine: as many whole groups each as possible."""
  groups = np.arange(rows // group_size)
  sizes = [len(some) * group_size for some in np.array_split(groups, engines)]
  ends = np.cumsum(sizes)
  return [
    slice(int(end) - size, int(end))
    for size, end in zip(sizes, ends, strict=True)
  ]


class Joined:
  """The completions of several engines, in the order of their rows."""

  def __init__(self, some: Sequence[futures.Future]):
    """Takes the future of each engine."""
    self._futures = some

  def result(self) -> list:
    """Waits for all; if one fails, the others are not needed."""
    try:
      return [x for future in self._futures for x in future.result()]
    except BaseException:
      self.cancel()
      raise

  def done(self) -> bool:
    return all(future.done() for future in self._futures)

  def cancel(self):
    for future in self._futures:
      future.cancel()

  def add_done_callback(self, call: Callable[[futures.Future], None]):
    """Lets `call` be called when the rows of each engine have ended."""
    for future in self._futures:
      future.add_done_callback(call)


def shared_stop(
  should_stop: Callable[[Set[int]], bool], rows: Sequence[slice]
) -> list[Callable[[Set[int]], bool]]:
  """A condition for each engine, on the rows that have ended in all of them.

  Args:
    should_stop: whether to stop, given indices of rows that have ended.
    rows: those of each engine, which numbers its own from 0.
  """
  ended, lock = set(), threading.Lock()

  def of(first: int):
    def stops(some):
      with lock:
        ended.update(first + i for i in some)
        return should_stop(ended)

    return stops

  return [of(some.start) for some in rows]
