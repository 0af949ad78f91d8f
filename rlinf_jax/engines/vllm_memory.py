"""The memory of vLLM on each of its devices."""

import jax
import jax.numpy as jnp

from rlinf_jax.system import memory
from stages.models import transformer

BLOCK = 128  # Tokens; vLLM reserves keys and values in blocks of 16 to 128.
SPARE = 0.1  # Of the free memory, for activations and what vLLM itself needs.


def token_bytes(config: transformer.Config, ranks: int = 1) -> int:
  """Bytes of a token's keys and values on each of the ranks.

  Ranks divide the heads; each of more ranks than heads has a whole one.
  """
  heads = -(-config.K // ranks)
  item = jnp.dtype(config.dtype).itemsize
  return 2 * config.L * heads * config.W * item


def row_bytes(
  config: transformer.Config, max_model_len: int, ranks: int = 1
) -> int:
  """Bytes that a row of the most tokens takes on each of the ranks, in blocks.

  These are its keys and values, of its prompt and its completion together.
  """
  return BLOCK * -(-max_model_len // BLOCK) * token_bytes(config, ranks)


def parameter_bytes(config: transformer.Config, ranks: int = 1) -> float:
  """Bytes of the parameters on each of the ranks, in the model's arithmetic."""
  leaves = jax.tree.leaves(transformer.param_shapes(config))
  item = jnp.dtype(config.dtype).itemsize
  return item * sum(leaf.size for leaf in leaves) / ranks


def reserved(
  config: transformer.Config,
  rows: int,
  max_model_len: int,
  devices: tuple[int, ...] = (),
  processes: int = 0,
) -> int:
  """Bytes of each device for keys and values: as needed, or as are left.

  Args:
    config: dimensions of the model.
    rows: maximum number of completions decoded at once.
    max_model_len: maximum tokens of a prompt and its completion together.
    devices: as in `vllm_start.Settings`.
    processes: likewise.

  Raises:
    ValueError: if not one completion fits into the free memory.
  """
  ranks = max(1, len(devices))
  block = BLOCK * token_bytes(config, ranks)
  row = row_bytes(config, max_model_len, ranks)
  parameters = parameter_bytes(config, ranks)
  free = free_bytes(devices, processes)
  left = (1 - SPARE) * free - parameters
  least = row + block  # vLLM leaves the first block empty.
  if left < least:
    raise ValueError(
      f'vLLM needs {parameters / 1e9:.3g} GB of each device for parameters and '
      f'{least / 1e9:.3g} GB for the keys and values of one completion of '
      f'{max_model_len} tokens, and {free / 1e9:.3g} GB are free: give its '
      'place more devices, or leave it more of a GPU '
      '(XLA_CLIENT_MEM_FRACTION says how much JAX takes).'
    )
  return int(min(rows * row + block, left))


def free_bytes(devices: tuple[int, ...], processes: int) -> float:
  """Bytes that are free for each rank, on the fullest of its devices.

  Args:
    devices: numbers of GPUs; ignored on a CPU, whose processes share memory.
    processes: processes of the place that are about to start, or 0.
  """
  if jax.default_backend() == 'cpu':
    return memory.available() / max(1, processes)
  import torch

  return min(torch.cuda.mem_get_info(i)[0] for i in devices or (0,))
