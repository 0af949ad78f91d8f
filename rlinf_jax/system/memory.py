"""Free memory of this machine."""

import contextlib
import pathlib

import psutil


def available() -> float:
  """Bytes that are free on this machine, or in the container around it."""
  free = psutil.virtual_memory().available
  group = pathlib.Path('/sys/fs/cgroup')
  # Without a limit there is no file, or it says 'max'.
  with contextlib.suppress(OSError, ValueError):
    limit = int((group / 'memory.max').read_text())
    free = min(free, limit - int((group / 'memory.current').read_text()))
  return free
