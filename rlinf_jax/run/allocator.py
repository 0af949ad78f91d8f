"""How this process holds on to memory."""

import ctypes

# Of malloc.h: what `mallopt` is asked to set.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
MOST = 2**31 - 1


def keep() -> bool:
  """Keeps memory that is freed, for what is allocated next.

  glibc gives large arrays back to the system at once, and the next call of a
  compiled function takes the same pages again, each by a fault: a twelfth
  of a step of the arithmetic job.

  Returns:
    Whether the C library has agreed; others than glibc are left as they are.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  return all([mallopt(MMAP_MAX, 0) == 1, mallopt(TRIM_THRESHOLD, MOST) == 1])
