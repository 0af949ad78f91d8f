"""Traces of a step by JAX's profiler, and the memory of devices."""

from collections.abc import Iterator
import contextlib
import pathlib

import jax

FOLDER = 'profile'  # In the run folder.


@contextlib.contextmanager
def record(folder: pathlib.Path, enabled: bool = True) -> Iterator[None]:
  """Records what this process and its devices do, for XProf and TensorBoard.

  Args:
    folder: the run folder.
    enabled: False to record nothing.

  Raises:
    RuntimeError: if another trace is being recorded.
  """
  if not enabled:
    yield
    return
  with jax.profiler.trace(str(folder / FOLDER)):
    yield


def memory() -> dict[str, float]:
  """The most bytes that a device of this process has held so far, in GiB.

  Empty where devices do not count them, as CPUs.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if 'peak_bytes_in_use' in s]
  return {'memory/peak_gib': max(peaks) / 2**30} if peaks else {}
