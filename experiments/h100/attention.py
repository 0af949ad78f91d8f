"""Seconds and errors of attention on an accelerator, by implementation.

  python -m experiments.h100.attention

Heads are Qwen2.5-1.5B's, rows have padding before their tokens, and a call has
16,384 tokens. Errors are against float32 with all products in full precision.
"""

import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp

from stages import kernels
from stages.models.layers import attention

H, K, W = 12, 2, 128
TOKENS = 16_384
LENGTHS = (512, 8192)
ROUNDS = 7


def inputs(T: int, dtype):
  """Queries, keys, values and the key mask of rows of `T` tokens."""
  B = TOKENS // T
  keys = jax.random.split(jax.random.key(T), 4)
  q = jax.random.normal(keys[0], (B, T, H, W), dtype)
  k = jax.random.normal(keys[1], (B, T, K, W), dtype)
  v = jax.random.normal(keys[2], (B, T, K, W), dtype)
  padding_B1 = jax.random.randint(keys[3], (B, 1), 0, T // 4)
  return q, k, v, jnp.arange(T)[None] >= padding_B1


@functools.partial(jax.jit, static_argnums=(4, 5))
def outputs(q, k, v, is_key_BC, implementation: str, with_gradient: bool):
  """Attention, zero where the query is padding, and its gradients."""

  def attend(q, k, v):
    mask = attention.Mask(is_key_BC)
    seen = attention.attention(q, k, v, mask, implementation=implementation)
    return jnp.where(is_key_BC[:, :, None, None], seen, 0)

  if not with_gradient:
    return (attend(q, k, v),)
  seen, pull = jax.vjp(attend, q, k, v)
  return seen, *pull(
    jnp.cos(jnp.arange(seen.size)).reshape(seen.shape).astype(seen.dtype)
  )


def seconds(call) -> float:
  """The median of several calls after the first, which compiles."""
  jax.block_until_ready(call())
  took = []
  for _ in range(ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready(call())
    took.append(time.perf_counter() - start)
  return statistics.median(took)


def error(got, want) -> float:
  """The norm of the difference of two arrays over that of the second."""
  got, want = (x.astype(jnp.float32) for x in (got, want))
  return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def main():
  """Prints one line of JSON for each length and implementation."""
  for T in LENGTHS:
    arrays = inputs(T, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    with jax.default_matmul_precision('highest'):
      want = outputs(*wide, arrays[3], kernels.CHUNKED, True)
    for name in (kernels.CHUNKED, kernels.CUDNN):
      call = functools.partial(outputs, *arrays, name)
      errors = map(error, call(True), want)
      # Two products of T × T × W for each head, below the diagonal.
      flops = 4 * TOKENS * T * H * W / 2
      forward, both = seconds(lambda: call(False)), seconds(lambda: call(True))
      line = {
        'device': jax.devices()[0].device_kind,
        'attention': name,
        'tokens': T,
        'forward_ms': 1e3 * forward,
        'forward_tflops': flops / forward / 1e12,
        'with_gradient_ms': 1e3 * both,
        'error': max(errors),
      }
      print(json.dumps(line), flush=True)


if __name__ == '__main__':
  main()
