"""Starts vLLM, in this process or in one process a rank."""

import contextlib
import dataclasses
import logging
import os
import sys
import typing
import warnings

import jax

from rlinf_jax.engines import vllm_memory
from stages.models import transformer


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an engine; equal settings share one engine.

  Attributes:
    checkpoint: folder whose configuration is read.
    config: dimensions of the model, and the type of its arithmetic.
    max_num_seqs: maximum number of completions decoded at once.
    kv_cache_memory_bytes: memory of each device for keys and values; that of
      `max_num_seqs` completions if None, as far as it is free.
    max_model_len: maximum tokens of a prompt and its completion together; that
      of the first request if None.
    devices: numbers of the devices that divide the model; one if it is empty.
    lora_rank: rank of the adapters that it takes beside parameters, or 0.
    processes: devices of its place, on which engines have a process each; 0 for
      an engine that computes in this process.
    block_size: tokens of a block of keys and values; vLLM's own if None.
    loads: whether vLLM reads the weights of the checkpoint itself, and keeps
      them; requests then have no parameters.
  """

  checkpoint: str
  config: transformer.Config
  max_num_seqs: int
  kv_cache_memory_bytes: int | None
  max_model_len: int | None
  lora_rank: int = 0
  devices: tuple[int, ...] = ()
  processes: int = 0
  block_size: int | None = None
  loads: bool = False


def start(settings: Settings, max_model_len: int, enable_sleep: bool):
  """Returns a vLLM engine.

  Its parameters are those of the checkpoint if the settings say so, or else
  dummies, which are replaced later.

  Args:
    settings: of the engine.
    max_model_len: maximum tokens of a prompt and its completion together.
    enable_sleep: whether the engine must be able to release its memory.
  """
  cpu = jax.default_backend() == 'cpu'
  cache = settings.kv_cache_memory_bytes
  if cache is None:
    cache = vllm_memory.reserved(
      settings.config,
      settings.max_num_seqs,
      max_model_len,
      settings.devices,
      settings.processes,
    )
  if cpu:
    _compile_nothing()
  logging.getLogger('torch._library.triton').setLevel(logging.ERROR)
  with warnings.catch_warnings(), _environment_of_ranks(settings):
    warnings.simplefilter('ignore')  # Warnings of vLLM's dependencies.
    import vllm

    from rlinf_jax.engines import vllm_weights

    vllm_weights.tolerate_broken_modules()
    return vllm.LLMEngine.from_engine_args(
      vllm.EngineArgs(
        model=settings.checkpoint,
        dtype=settings.config.dtype,
        load_format='auto' if settings.loads else 'dummy',
        skip_tokenizer_init=True,
        enforce_eager=cpu,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=cache,
        block_size=settings.block_size,
        # Turns of a conversation find the keys and values of earlier ones.
        enable_prefix_caching=True,
        tensor_parallel_size=max(1, len(settings.devices)),
        distributed_executor_backend='mp' if settings.processes else None,
        device_ids=None if cpu else [*settings.devices] or None,
        # By default vLLM claims most of a device, of which JAX holds a part.
        gpu_memory_utilization=0.01,
        # Log-probabilities of the sampling distribution, not of raw logits.
        logprobs_mode='processed_logprobs',
        # A chunked prompt rewinds the random generator of its row, which torch
        # cannot do on a CPU (vLLM 0.32).
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(max_model_len, settings.max_num_seqs, 8192),
        disable_log_stats=True,
        enable_lora=settings.lora_rank > 0,
        max_loras=1,
        max_lora_rank=_reserved_rank(settings.lora_rank),
        # Allocates releasable memory, which CPUs do not have.
        enable_sleep_mode=enable_sleep and not cpu,
      )
    )


def _compile_nothing():
  """Has torch compile nothing of vLLM, unless the environment says otherwise.

  Compiling takes half a minute and a compiler, and gains little on a CPU. If
  torch was imported before, it has read the environment.
  """
  off = os.environ.setdefault('TORCH_COMPILE_DISABLE', '1')
  if 'torch._dynamo.config' in sys.modules:
    sys.modules['torch._dynamo.config'].disable = off == '1'


def _reserved_rank(rank: int) -> int:
  """The smallest rank that vLLM reserves memory for, and that holds `rank`.

  Raises:
    ValueError: if vLLM has none.
  """
  from vllm.config import lora

  known = typing.get_args(lora.MaxLoRARanks)
  if rank > max(known):
    raise ValueError(
      f'vLLM takes adapters of ranks up to {max(known)}, and this one has '
      f'{rank}: lower the rank, or leave the engine out.'
    )
  return min(n for n in known if n >= rank)


@contextlib.contextmanager
def _environment_of_ranks(settings: Settings):
  """Sets variables that processes of ranks read, where the user has not."""
  if not settings.processes:
    yield
    return
  cores = len(os.sched_getaffinity(0))
  wanted = {
    'OMP_NUM_THREADS': str(max(1, cores // settings.processes)),
    # A fork would inherit the threads and the GPU contexts of JAX.
    'VLLM_WORKER_MULTIPROC_METHOD': 'spawn',
    # All are on this machine, so no other one needs to reach them.
    'GLOO_SOCKET_IFNAME': 'lo',
    'NCCL_SOCKET_IFNAME': 'lo',
    'VLLM_HOST_IP': '127.0.0.1',
    'PYTHONWARNINGS': 'ignore',  # Warnings of vLLM's dependencies.
  }
  unset = wanted.keys() - os.environ.keys()
  os.environ.update({name: wanted[name] for name in unset})
  try:
    yield
  finally:
    for name in unset:
      os.environ.pop(name, None)
