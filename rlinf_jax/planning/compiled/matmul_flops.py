"""Operations of the matrix products of a compiled program."""

import functools
import math
import re

import numpy as np

from planner.counting import kernels
from rlinf_jax.planning.compiled import hlo

FMHA = 'custom_call_target="__cudnn$fmhaSoftmax'
FMHA_MASK = re.compile(r'"mask_type": ?"(\w+)"')
PALLAS = 'custom_call_target="tpu_custom_call"'
FLOATS = ('bf16', 'f32')
CHUNK = 2**20  # Pairs of positions that are compared at once.
# Calls of cuBLAS, whose dimensions are in the configuration of the call.
CUBLAS = re.compile(r'custom_call_target="__cublas[\w$]*matmul|"__cublas\$gemm')


def matmul_flops(module: hlo.Module) -> float:
  """Counts the operations of matrix products and convolutions of a call.

  A multiply-add is two operations. Those on a single device are counted, by the
  dimensions that the device has, and loops as `hlo.walk` counts them. Of other
  kernels, attention counts, as `kernels.Attention` has it.
  """
  return sum(
    executed.times * flops(executed.instruction, executed.computation)
    for executed in hlo.walk(module)
  )


def flops(instruction: hlo.Instruction, computation: hlo.Computation) -> float:
  """Counts the operations of one instruction; 0 if it is not a product."""
  if instruction.opcode == 'convolution':
    return _of_convolution(instruction, computation)
  if PALLAS in instruction.attributes:
    return _of_pallas(instruction, computation)
  if FMHA in instruction.attributes:
    phase = 'bwd' if f'{FMHA}Backward' in instruction.attributes else 'fwd'
    shapes = [_operand(instruction, computation, i).shape for i in range(3)]
    mask_type = FMHA_MASK.search(instruction.attributes)[1]
    return kernels.cudnn(phase, shapes, mask_type).matmul_flops
  is_cublas = instruction.opcode == 'custom-call' and CUBLAS.search(
    instruction.attributes
  )
  if instruction.opcode != 'dot' and not is_cublas:
    return 0.0
  contracted = re.search(
    r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)', instruction.attributes
  )
  left = _operand(instruction, computation, 0)
  dims = [
    int(n) for n in re.findall(r'\d+', contracted[1] if contracted else '')
  ]
  out = instruction.arrays[0]  # cuBLAS returns its workspace, too.
  return 2.0 * math.prod(out.shape) * math.prod(left.shape[i] for i in dims)


def _of_pallas(instruction, computation) -> float:
  """Counts the operations of attention; 0 for another kernel."""
  match = kernels.SPLASH.match(instruction.name)
  if not match:
    return 0.0
  # Before the queries, keys and values are integers: which blocks follow.
  operands = [computation[name].arrays[0] for name in instruction.operands]
  shapes = [x.shape for x in operands if x.dtype in FLOATS][:3]
  suffix = '' if match[1] == 'fwd' else f'_{match[1]}'
  blocks = (
    int(
      re.search(rf'\bblock_{side}{suffix}\\": (\d+)', instruction.attributes)[1]
    )
    for side in ('q', 'kv')
  )
  return kernels.splash(instruction.name, shapes, *blocks).matmul_flops


def _operand(instruction, computation, i: int) -> hlo.Array:
  return computation[instruction.operands[i]].arrays[0]


def _of_convolution(instruction, computation) -> float:
  """Counts the operations of a convolution, in which a TPU states a product.

  A batched product is one whose batch is a spatial dimension, dilated and
  padded so that each output sees one input: only positions of the window that
  lie on an input count.
  """
  labels = re.search(
    r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes
  ).groups()
  inputs, kernel = (_operand(instruction, computation, i) for i in (0, 1))
  output = instruction.arrays[0]
  total = 2.0 * output.shape[labels[2].index('b')]
  total *= output.shape[labels[2].index('f')]
  total *= kernel.shape[labels[1].index('i')]
  for i, window in enumerate(_windows(instruction.attributes)):
    sizes = (
      x.shape[label.index(str(i))]
      for x, label in zip((inputs, kernel, output), labels, strict=True)
    )
    total *= valid_positions(*sizes, *window)
  return total


def _windows(text: str) -> list[tuple[int, int, int, int]]:
  """Reads stride, left padding and dilations of each spatial dimension."""
  match = re.search(r'\bwindow=\{([^}]*)\}', text)
  fields = dict(re.findall(r'(\w+)=([\dx_-]+)', match[1])) if match else {}
  n = len(fields.get('size', '').split('x')) if fields.get('size') else 0

  def read(name, default):
    values = fields.get(name, 'x'.join([default] * n)).split('x')
    return [int(value.split('_')[0]) for value in values]

  names = (
    ('stride', '1'),
    ('pad', '0'),
    ('lhs_dilate', '1'),
    ('rhs_dilate', '1'),
  )
  return list(zip(*(read(*pair) for pair in names), strict=True)) if n else []


@functools.lru_cache(4096)
def valid_positions(
  inputs: int,
  kernel: int,
  outputs: int,
  stride: int,
  padding: int,
  input_dilation: int,
  kernel_dilation: int,
) -> int:
  """Counts pairs of an output and a kernel position that see an input.

  Output o and kernel position k see position o·stride + k·dilation - padding
  of the dilated input, where every `input_dilation`-th position is an input.
  """
  at = np.arange(outputs)[:, None] * stride - padding
  total, chunk = 0, max(1, CHUNK // outputs)
  for first in range(0, kernel, chunk):
    k = np.arange(first, min(first + chunk, kernel))[None] * kernel_dilation
    seen = at + k
    is_input = (seen >= 0) & (seen % input_dilation == 0)
    is_input &= seen < (inputs - 1) * input_dilation + 1
    total += int(is_input.sum())
  return total
