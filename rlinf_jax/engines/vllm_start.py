"""How vLLM is started in this process."""

import logging
import os
import warnings

import jax


def started(settings, context: int, sleeps: bool):
  """vLLM with parameters of no meaning, to be sent some.

  Args:
    settings: as `vllm_engine.Settings`.
    context: most tokens of a prompt and its completion.
    sleeps: whether it will be told to give its memory back.
  """
  cpu = jax.default_backend() == 'cpu'
  if cpu:
    # What it gains does not pay for a compiler and half a minute.
    os.environ.setdefault('TORCH_COMPILE_DISABLE', '1')
  logging.getLogger('torch._library.triton').setLevel(logging.ERROR)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Its own, of what it depends on.
    import vllm
    from vllm import config

    from rlinf_jax.engines import vllm_weights

    vllm_weights.register()
    vllm_weights.look_calmly()
    return vllm.LLMEngine.from_engine_args(
      vllm.EngineArgs(
        model=settings.checkpoint,
        dtype=settings.dtype,
        load_format='dummy',
        skip_tokenizer_init=True,
        enforce_eager=cpu,
        max_model_len=context,
        max_num_seqs=settings.rows,
        kv_cache_memory_bytes=settings.memory,
        # Else it would ask for most of a device of which JAX has a part.
        gpu_memory_utilization=0.01,
        # Of the distribution drawn from, not of the bare logits.
        logprobs_mode='processed_logprobs',
        # A prompt read in parts rewinds its row's generator, which those of
        # torch on a CPU cannot (0.32).
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(context, settings.rows, 8192),
        weight_transfer_config=config.WeightTransferConfig(
          backend=vllm_weights.NAME
        ),
        disable_log_stats=True,
        # Which takes memory that can be given back; CPUs have none of that.
        enable_sleep_mode=sleeps and not cpu,
      )
    )
