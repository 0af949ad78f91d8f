"""Starts vLLM in this process."""

import logging
import os
import warnings

import jax


def start(settings, max_model_len: int, enable_sleep: bool):
  """Returns a vLLM engine with dummy parameters, which are replaced later.

  Args:
    settings: a `vllm_engine.Settings`.
    max_model_len: maximum tokens of a prompt and its completion together.
    enable_sleep: whether the engine must be able to release its memory.
  """
  cpu = jax.default_backend() == 'cpu'
  if cpu:
    # Compiling takes half a minute and a compiler, and gains little.
    os.environ.setdefault('TORCH_COMPILE_DISABLE', '1')
  logging.getLogger('torch._library.triton').setLevel(logging.ERROR)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Warnings of vLLM's dependencies.
    import vllm
    from vllm import config

    from rlinf_jax.engines import vllm_weights

    vllm_weights.register()
    vllm_weights.tolerate_broken_modules()
    return vllm.LLMEngine.from_engine_args(
      vllm.EngineArgs(
        model=settings.checkpoint,
        dtype=settings.dtype,
        load_format='dummy',
        skip_tokenizer_init=True,
        enforce_eager=cpu,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        # By default vLLM claims most of a device, of which JAX holds a part.
        gpu_memory_utilization=0.01,
        # Log-probabilities of the sampling distribution, not of raw logits.
        logprobs_mode='processed_logprobs',
        # A chunked prompt rewinds the random generator of its row, which torch
        # cannot do on a CPU (vLLM 0.32).
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(max_model_len, settings.max_num_seqs, 8192),
        weight_transfer_config=config.WeightTransferConfig(
          backend=vllm_weights.NAME
        ),
        disable_log_stats=True,
        # Allocates releasable memory, which CPUs do not have.
        enable_sleep_mode=enable_sleep and not cpu,
      )
    )
