"""Frozen weights in eight or four bits, as in QLoRA, arXiv:2305.14314.

  int8:  w ≈ s · q        nf4:  w ≈ s · level[q]

The inputs of a matrix are divided into blocks of up to 64 numbers. Each block
has a scale s, from the largest |w| in it. q is an integer of eight bits, or the
index of one of 16 levels, which are quantiles of a normal distribution. The
library qwix computes s, q and the levels. A matrix is expanded where it is
used, one layer at a time, and again in the backward pass.

A quantized matrix `up_DF` of parameters holds q, and `up_scale_DF` beside it
holds s, with one row a block. In nf4, two indices share a byte, so that q has
half as many rows as the matrix.
"""

from collections.abc import Mapping
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

Kind = Literal['int8', 'nf4']
BLOCK = 64  # As in QLoRA.
# The types that q is stored in tell the kinds apart. JAX 0.10.2 cannot pass
# arrays of four bits to compiled programs, so two numbers share a byte.
STORED = {'int8': jnp.int8, 'nf4': jnp.uint8}


def library():
  """The module `qwix`.

  Raises:
    ValueError: if it is not installed.
  """
  try:
    import qwix
  except ImportError as error:
    raise ValueError(
      'Quantized weights need qwix, which is not installed: '
      "pip install 'rlinf-jax[qlora]', or set quantize to None "
      '(LORA_QUANTIZE in gin).'
    ) from error
  return qwix


def check(kind: Kind | None):
  """Refuses unknown kinds, and a known one without its library.

  Raises:
    ValueError: for both.
  """
  if kind is None:
    return
  if kind not in STORED:
    known = ', '.join(map(repr, STORED))
    raise ValueError(
      f'Frozen weights cannot be quantized to {kind!r}: give {known}, or None '
      'to leave them as they are.'
    )
  library()


def scale_name(parameter: str) -> str:
  """The name of the scales of a matrix: `up_scale_DF` for `up_DF`."""
  stem, letters = parameter.rsplit('_', 1)
  return f'{stem}_scale_{letters}'


def block_size(inputs: int) -> int:
  """The numbers of a block: the most that divide the inputs, up to 64."""
  return max(n for n in range(1, BLOCK + 1) if not inputs % n)


def quantize(w, axis: int, kind: Kind) -> tuple[jax.Array, jax.Array]:
  """q and s of a matrix.

  Args:
    w: the matrix, of any dimensions.
    axis: dimension along which numbers share a scale; the others have scales of
      their own.
    kind: of q.

  Raises:
    ValueError: for four bits and an odd number along the dimension.
  """
  size = w.shape[axis]
  found = library().quantize(
    w,
    'nf4' if kind == 'nf4' else STORED[kind],
    channelwise_axes=[i for i in range(w.ndim) if i != axis],
    tiled_axes={axis: block_size(size)},
  )
  q = found.qvalue.astype(STORED[kind])
  if kind == 'nf4':
    if size % 2:
      raise ValueError(
        f'A matrix of shape {w.shape} has {size} inputs, an odd number, of '
        "which no two can share a byte: quantize to 'int8', or not at all."
      )
    pairs = q.reshape(*w.shape[:axis], size // 2, 2, *w.shape[axis + 1 :])
    first, second = jnp.moveaxis(pairs, axis + 1, 0)
    q = first | second << 4
  return q, found.scale


def expand(q, s, axis: int):
  """The matrix of q and s, in the type of s; `axis` as in `quantize`."""
  qtype = q.dtype
  if q.dtype == STORED['nf4']:
    qtype, shape = 'nf4', list(q.shape)
    shape[axis] *= 2
    q = jnp.stack([q & 15, q >> 4], axis=axis + 1).reshape(shape)
  qwix = library()
  return qwix.dequantize(qwix.QArray(q, s, qtype=qtype))


def quantize_layers(
  layers: Mapping[str, Any], axes: Mapping[str, int], kind: Kind
) -> dict[str, Any]:
  """Parameters of layers, stacked, with some matrices quantized.

  Args:
    layers: the parameters, by name.
    axes: the dimension of each of these matrices, in a layer, along which
      numbers share a scale.
    kind: of the quantized matrices.
  """
  found = dict(layers)
  for name, axis in axes.items():
    one = functools.partial(quantize, axis=axis, kind=kind)
    # Layer by layer: distances to all levels take sixteen times its memory.
    found[name], found[scale_name(name)] = jax.lax.map(one, layers[name])
  return found


def expand_layers(
  layers: Mapping[str, Any], axes: Mapping[str, int]
) -> dict[str, Any]:
  """The reverse of `quantize_layers`, up to its error."""
  found = dict(layers)
  for name, axis in axes.items():
    scale = found.pop(scale_name(name), None)
    if scale is not None:
      found[name] = jax.lax.map(
        lambda x, axis=axis: expand(*x, axis), (found[name], scale)
      )
  return found


def product(compute, equation: str, x, q, s, axis: int):
  """Computes the product of `x` and a quantized matrix.

  Args:
    compute: `equation, x, matrix -> product`.
    equation: einsum equation.
    x: the other factor.
    q: the matrix.
    s: its scales.
    axis: as in `quantize`.
  """

  # Expanded again in the backward pass: it would keep all layers' otherwise.
  @jax.checkpoint
  def run(x, q, s):
    return compute(equation, x, expand(q, s, axis).astype(x.dtype))

  return run(x, q, s)
