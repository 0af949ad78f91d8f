"""Parameters in JAX as tensors of vLLM, and their way to its ranks."""

from collections.abc import Iterator
import mmap
import os
from typing import Any

import jax
import numpy as np
import torch

from rlinf_jax.engines import vllm_worker
from stages.models.files import naming, weights

ALIGNMENT = 64  # Bytes.


def tensor(x: jax.Array, dtype: str | None = None) -> torch.Tensor:
  """An array as a tensor, without a copy if it is on one device.

  Args:
    x: the array.
    dtype: type that devices round it to before it goes through the host's
      memory, which is where several of them are put together; None for its own.
  """
  if len(x.devices()) == 1:
    return torch.from_dlpack(jax.block_until_ready(x))
  whole = np.array(x if dtype is None else x.astype(dtype))
  if whole.dtype == jax.numpy.bfloat16:  # Which torch does not read from NumPy.
    return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
  return torch.from_numpy(whole)


def tensors(
  params: Any, names: dict[str, naming.Tensor], dtype: str | None = None
) -> Iterator[dict[str, torch.Tensor]]:
  """Yields the tensors of a checkpoint, those of one parameter at a time.

  Args:
    params: the parameters.
    names: the checkpoint tensor of each.
    dtype: as in `tensor`.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    tree = tensor(leaf, dtype)
    for key in reversed(path):
      tree = {key.key: tree}
    yield dict(weights.checkpoint_tensors(tree, names))


class SharedTensors:
  """Tensors in shared memory, which every rank of a machine reads.

  The memory of a parameter is kept for its next version. It is a file without
  a name (`memfd_create`), which ranks find by the process that has it open. A
  name in /dev/shm would take of a file system that containers keep small (64
  MiB in Docker), where writing past its end kills the process by SIGBUS.
  """

  def __init__(self, dtype: str):
    """Takes the type that tensors are rounded to."""
    self._name, self._dtype = dtype, getattr(torch, dtype)
    self._memories: list[tuple[int, mmap.mmap]] = []  # Files, and their maps.

  def write(
    self, params: Any, names: dict[str, naming.Tensor]
  ) -> dict[str, tuple[str, int, list[int]]]:
    """Writes parameters; returns a table for `vllm_worker.update_from_memory`.

    Ranks must have read the tensors written before.
    """
    table = {}
    for i, some in enumerate(tensors(params, names, self._name)):
      offsets, end = {}, 0
      for name, x in some.items():
        offsets[name] = end
        size = x.numel() * self._dtype.itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
      if i == len(self._memories):
        file = os.memfd_create('rlinf_jax_tensors')
        os.ftruncate(file, end)
        self._memories.append((file, mmap.mmap(file, end)))
      file, memory = self._memories[i]
      for name, x in some.items():
        place = vllm_worker.view(memory, self._dtype, offsets[name], x.shape)
        place.copy_(x)
        path = f'/proc/{os.getpid()}/fd/{file}'
        table[name] = path, offsets[name], [*x.shape]
    return table

  def close(self):
    """Releases the memory."""
    while self._memories:
      file, memory = self._memories.pop()
      memory.close()
      os.close(file)


def sync_omp_threads():
  """Sets OpenMP's number of threads in the calling thread to that of torch.

  OpenMP keeps one number for each calling thread, and vLLM's attention on a CPU
  fails if it differs from torch's.
  """
  torch.set_num_threads(torch.get_num_threads())


def tolerate_broken_modules():
  """Makes vLLM skip module attributes that raise when they are inspected.

  On a CPU, vLLM inspects `__dict__` of everything in every loaded module as it
  starts. Some modules raise, such as the placeholders that trimesh (a
  dependency of simulators) has for packages that are not installed.
  """
  try:
    from vllm.triton_utils import dispatcher
  except ImportError:
    return

  def safe_hasattr(x, name):
    try:
      return hasattr(x, name)
    except Exception:  # noqa: BLE001 (foreign modules may raise anything)
      return False

  dispatcher.hasattr = safe_hasattr  # Shadows the builtin in that module only.
