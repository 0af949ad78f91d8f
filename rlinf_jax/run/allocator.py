"""Memory allocation of this process."""

import ctypes
import os

# Share of a GPU's memory that JAX takes as it starts. Its own default, three
# quarters, is less than plans use: see `memory_reserve` in gin_configs/clusters.
SHARE = 0.9
# The variables in which JAX reads that share; the second is the older name.
VARIABLES = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
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


def claim_accelerators():
  """Lets JAX take as much of a GPU as plans use, unless the environment says.

  To be called before JAX starts its backend; elsewhere than on GPUs, JAX takes
  memory as it needs it.
  """
  if not any(name in os.environ for name in VARIABLES):
    os.environ[VARIABLES[0]] = str(SHARE)
