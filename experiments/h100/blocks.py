"""Milliseconds and errors of attention to all keys, on an accelerator.

  python -m experiments.h100.blocks

One call for each of the published sizes of OpenVLA-OFT, of π0's prefix and of
their vision towers, in bfloat16, with 8 rows. In the first two, instructions of
different lengths are padded. Errors are relative to float32 with all products
in full precision. `run` is 'chunked' or 'cudnn': cuDNN is called whether or not
`'auto'` would choose it.
"""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.h100 import attention as causal
from stages import kernels
from stages.models.layers import attention, cudnn

B = 8
PROMPT = 48  # Tokens of an instruction, padding included.
RUNS = (kernels.CHUNKED, kernels.CUDNN)


class Sizes(NamedTuple):
  """Sizes of one call of attention, with letters as in `stages/base.py`.

  Attributes:
    T: number of queries, and of keys.
    H: heads.
    K: key-value heads.
    W: width of a head.
    is_padded: whether an instruction is among the tokens, which has padding.
  """

  T: int
  H: int
  K: int
  W: int
  is_padded: bool


SIZES = {
  # 256 patches, an instruction, 8 × 7 placeholders and the stop.
  'OpenVLA-OFT': Sizes(256 + PROMPT + 56 + 1, 32, 32, 128, True),
  # Three cameras.
  'π0, prefix': Sizes(3 * 256 + PROMPT, 8, 1, 256, True),
  'DINOv2': Sizes(256 + 5, 16, 16, 64, False),
  'SigLIP': Sizes(256, 16, 16, 72, False),
}


def inputs(size: Sizes):
  """Queries, keys, values and the key mask [B, T], for the size of a call."""
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = ((B, size.T, n, size.W) for n in (size.H, size.K, size.K))
  arrays = [
    jax.random.normal(key, shape, jnp.bfloat16)
    for key, shape in zip(keys, shapes, strict=False)
  ]
  length_B1 = jax.random.randint(keys[3], (B, 1), 10, PROMPT)
  at_1T = jnp.arange(size.T)[None]
  is_padding_BT = (at_1T >= 256 + length_B1) & (at_1T < 256 + PROMPT)
  if not size.is_padded:
    is_padding_BT = jnp.zeros((B, size.T), bool)
  return (*arrays, ~is_padding_BT)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def outputs(q, k, v, is_key_BT, is_padded: bool, run: str, with_gradient: bool):
  """Attention [B, T, H, W], zero where the query is padding, and its gradients.

  The gradients are those of queries, keys and values, `with_gradient` only.
  """

  def attend(q, k, v):
    if run == kernels.CUDNN:
      some = is_key_BT if is_padded else None
      seen = cudnn.attention(q, k, v, some, is_causal=False)
    else:
      mask = attention.Mask(is_key_BT, attention.Bidirectional())
      seen = attention.attention(q, k, v, mask, implementation=run)
    return jnp.where(is_key_BT[:, :, None, None], seen, 0)

  if not with_gradient:
    return (attend(q, k, v),)
  seen, pull = jax.vjp(attend, q, k, v)
  cotangent = jnp.cos(jnp.arange(seen.size)).reshape(seen.shape)
  return seen, *pull(cotangent.astype(seen.dtype))


def measured(size: Sizes, run: str, arrays, want) -> dict[str, float]:
  """Milliseconds and TFLOP/s of a call, and its largest relative error.

  The error is the largest of those of the output and the three gradients.
  """
  call = functools.partial(outputs, *arrays, size.is_padded, run)
  found = {
    name: 1e3 * causal.seconds(functools.partial(call, with_gradient))
    for name, with_gradient in (
      ('forward_ms', False),
      ('with_gradient_ms', True),
    )
  }
  flops = 4 * B * size.H * size.T**2 * size.W
  return found | {
    'forward_tflops': flops / found['forward_ms'] / 1e9,
    'error': max(map(causal.error, call(True), want)),
  }


def main():
  """Prints one line of JSON for each size and implementation."""
  for name, size in SIZES.items():
    arrays = inputs(size)
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    with jax.default_matmul_precision('highest'):
      want = outputs(*wide, arrays[3], size.is_padded, kernels.CHUNKED, True)
    for run in RUNS:
      line = {'attention': run, 'of': name, **size._asdict()}
      try:
        line |= measured(size, run, arrays, want)
      except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        line['failed'] = str(error)  # The other sizes are measured still.
      device = jax.devices()[0].device_kind
      print(json.dumps({'device': device} | line), flush=True)


if __name__ == '__main__':
  main()
