"""Memory allocation of this process."""

import ctypes
import importlib.util
import os

# Share of a GPU's memory that JAX takes as it starts. Its own default, three
# quarters, is less than plans use (`memory_reserve` in gin_configs/clusters).
SHARE = 0.9
# The variables in which JAX reads that share; the second is the older name.
VARIABLES = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
CUDA_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')
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
  """Sets JAX's share and allocator of GPU memory, unless the environment does.

  To be called before JAX starts its backend. JAX then takes as much as plans
  assume. Its own allocator needs one gap between arrays for the temporary
  memory of a call: a gradient that needed 38 GiB failed with 43 GiB free
  (`experiments/h100`). CUDA's pools put pages together instead.
  """
  if not any(name in os.environ for name in VARIABLES):
    os.environ[VARIABLES[0]] = str(SHARE)
  if any(importlib.util.find_spec(name) for name in CUDA_PLUGINS):
    os.environ.setdefault('XLA_PYTHON_CLIENT_ALLOCATOR', 'cuda_async')
