"""Functions that vLLM calls in each of its ranks.

Ranks that are processes of their own import this module, and no JAX with it, so
that they start sooner and claim no devices.
"""

import contextlib
import mmap
import pathlib
import signal

import torch
from vllm import config
from vllm.model_executor.model_loader import reload


def update(worker, tensors: dict[str, torch.Tensor]):
  """Loads the tensors of a checkpoint into a rank's model.

  The model keeps its shard of each, in its own type and layout.

  Args:
    worker: vLLM's worker.
    tensors: by their names in a checkpoint.
  """
  model = worker.model_runner.get_model()
  if not hasattr(model, 'lm_head'):  # Gemma 2 uses the embedding.
    tensors = {name: x for name, x in tensors.items() if 'lm_head' not in name}
  with config.set_current_vllm_config(worker.vllm_config):
    reload.initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    reload.finalize_layerwise_reload(model, worker.model_config)
  torch.accelerator.synchronize()


def update_from_memory(worker, table: dict[str, tuple[str, int, list[int]]]):
  """Loads tensors that another process has written to shared memory.

  Args:
    worker: vLLM's worker.
    table: for each tensor, the path of its memory, the offset there in bytes,
      and the shape. Its type is that of the model.
  """
  with contextlib.ExitStack() as stack:
    memories = {
      path: stack.enter_context(_memory(path))
      for path in {path for path, _, _ in table.values()}
    }
    update(
      worker,
      {
        key: view(memories[path], worker.model_config.dtype, offset, shape)
        for key, (path, offset, shape) in table.items()
      },
    )


def _memory(path: str) -> mmap.mmap:
  """Maps the memory that another process has open."""
  with pathlib.Path(path).open('r+b') as file:
    return mmap.mmap(file.fileno(), 0)


def view(buffer, dtype: torch.dtype, offset: int, shape) -> torch.Tensor:
  """The tensor of a shape that starts at a byte of a buffer."""
  count = torch.Size(shape).numel()
  flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
  return flat.view(*shape)


def ignore_interrupts(worker):
  """Leaves it to the process that started this rank to end it.

  A terminal interrupts all processes of a run at once, and the run still
  finishes its step.
  """
  del worker
  signal.signal(signal.SIGINT, signal.SIG_IGN)
