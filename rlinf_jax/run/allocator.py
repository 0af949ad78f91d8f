"""Memory allocation of this process."""

import ctypes

# Parameters of `mallopt`, from malloc.h.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
NEVER = 2**31 - 1  # Bytes: a trim threshold that is never reached.


def retain_freed_memory() -> bool:
  """Makes malloc keep freed memory for later allocations.

  By default, glibc returns large arrays to the system at once, and the next
  call of a compiled function gets the same pages again, with a page fault for
  each: a twelfth of a step of gin_configs/grpo_arithmetic.gin.

  Returns:
    Whether the C library accepted; libraries other than glibc are unchanged.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  return all([mallopt(MMAP_MAX, 0) == 1, mallopt(TRIM_THRESHOLD, NEVER) == 1])
