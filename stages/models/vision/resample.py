"""Resampling of grids by separable filters, as Pillow and torch do it.

A filter of a line is a matrix [out, in] whose rows add up to one. Its entries
are computed in NumPy, since sizes are known when a program is traced.
"""

from collections.abc import Callable
import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np

Filter = Literal['bilinear', 'bicubic', 'lanczos']


def _cubic(x, a: float):
  """The cubic convolution kernel of slope `a` at 1."""
  x = np.abs(x)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = (((x - 5) * x + 8) * x - 4) * a
  return np.where(x < 1, near, np.where(x < 2, far, 0.0))


# Each kernel and its support: the distance from which it is zero.
FILTERS: dict[Filter, tuple[Callable, float]] = {
  'bilinear': (lambda x: np.maximum(1.0 - np.abs(x), 0.0), 1.0),
  'bicubic': (functools.partial(_cubic, a=-0.5), 2.0),
  'lanczos': (
    lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0),
    3.0,
  ),
}


@functools.lru_cache(maxsize=64)
def antialiased(size: int, out: int, kind: Filter) -> np.ndarray:
  """The filter [out, size] of Pillow, and of torch with `antialias=True`.

  The kernel is as much wider as the line becomes shorter. At the ends, samples
  that do not exist have no weight.
  """
  kernel, support = FILTERS[kind]
  scale = size / out
  width = max(scale, 1.0)
  weights = np.zeros((out, size))
  for i in range(out):
    center = (i + 0.5) * scale
    first = max(int(center - support * width + 0.5), 0)
    last = min(int(center + support * width + 0.5), size)
    weight = kernel((np.arange(first, last) - center + 0.5) * (1.0 / width))
    weights[i, first:last] = weight / weight.sum()
  return weights


@functools.lru_cache(maxsize=64)
def interpolated(size: int, out: int) -> np.ndarray:
  """The filter [out, size] of torch's bicubic interpolation.

  The kernel has a = −0.75 and keeps its width. At the ends, the first and the
  last sample are repeated.
  """
  weights = np.zeros((out, size))
  for i in range(out):
    center = (i + 0.5) * size / out - 0.5
    for k in range(int(np.floor(center)) - 1, int(np.floor(center)) + 3):
      weights[i, np.clip(k, 0, size - 1)] += _cubic(center - k, -0.75)
  return weights


def resize_grid(
  x_RCD, shape: tuple[int, int], antialias: bool, kind: Filter = 'bicubic'
):
  """Resampling of a grid of vectors, [rows, columns, D], in float32.

  Args:
    x_RCD: the grid.
    shape: rows and columns of the result.
    antialias: whether as `antialiased` does it, or as `interpolated`.
    kind: the filter, if it is antialiased; else it is bicubic.
  """
  if antialias:
    row, column = (
      antialiased(size, out, kind)
      for size, out in zip(x_RCD.shape[:2], shape, strict=True)
    )
  else:
    row, column = map(interpolated, x_RCD.shape[:2], shape)
  wide = jnp.promote_types(x_RCD.dtype, jnp.float32)
  y = jnp.einsum('or,rcd->ocd', row.astype(wide), x_RCD.astype(wide))
  y = jnp.einsum('pc,ocd->opd', column.astype(wide), y)
  return y.astype(x_RCD.dtype)


# Pillow's fixed-point arithmetic: 8 bits of a sample and 2 of overshoot leave
# this many for the weights.
_PRECISION = 32 - 8 - 2


def resize_image(image, shape: tuple[int, int], kind: Filter = 'bicubic'):
  """Resizes images of bytes, [..., rows, columns, colors], as Pillow does.

  Bits are those of `PIL.Image.resize`: weights are whole numbers, columns are
  resampled before rows, and both results are rounded to bytes. Pillow 13 takes
  rows first for some tall images, which differs by some grey levels in noise;
  the versions that published models were trained with do not.

  Args:
    image: uint8 images.
    shape: rows and columns of the result.
    kind: the filter.
  """
  for axis, size in ((-2, shape[1]), (-3, shape[0])):
    if image.shape[axis] != size:
      image = _resample_line(image, axis, size, kind)
  return image


def _resample_line(image, axis: int, out: int, kind: Filter):
  """Resamples one axis of images of bytes, with weights of whole numbers."""
  weights = antialiased(image.shape[axis], out, kind)
  fixed = np.trunc(weights * 2**_PRECISION + np.copysign(0.5, weights))
  fixed = fixed.astype(np.int32)
  used = weights != 0
  first = used.argmax(1)
  taps = (weights.shape[1] - used[:, ::-1].argmax(1) - first).max()
  # The same number of samples for every output; excess ones weigh nothing.
  first = np.minimum(first, weights.shape[1] - taps)
  shape = [1] * image.ndim
  shape[axis] = out
  total = jnp.int32(1 << (_PRECISION - 1))
  for k in range(taps):
    sample = jnp.take(image, first + k, axis=axis).astype(jnp.int32)
    weight = fixed[np.arange(out), first + k].reshape(shape)
    total = total + sample * weight
  total = total >> _PRECISION
  return jnp.clip(total, 0, 255).astype(jnp.uint8)
