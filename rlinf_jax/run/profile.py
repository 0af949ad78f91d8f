"""What accelerators do in a step: traces of the profiler, and memory."""

from collections.abc import Iterator
import contextlib
import pathlib

import jax

FOLDER = 'profile'  # In the run folder.


@contextlib.contextmanager
def recorded(folder: pathlib.Path, is_wanted: bool = True) -> Iterator[None]:
  """Records what this process and its devices do, if that is wanted.

  XProf and TensorBoard read what is written. A trace that cannot be started, as
  another program holds the profiler, raises RuntimeError.

  Args:
    folder: the run folder.
    is_wanted: False to record nothing.
  """
  if not is_wanted:
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
