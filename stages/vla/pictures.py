"""Pre-processing of pictures, as OpenVLA's published processor does it.

Pictures stay bytes until they are on the device. Resizing has the bits of
Pillow's; only the normalization is in floating point.
"""

import dataclasses
import functools
import typing
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from stages.models.vision import resample

Strategy = Literal['resize-naive', 'letterbox', 'resize-crop']
Color = tuple[float, float, float]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class Pictures:
  """Settings by which pictures become inputs of vision towers.

  Attributes:
    sizes: edge of each tower's input, in pixels.
    means: mean of red, green and blue in 0 … 1, for each tower.
    stds: their standard deviation.
    strategy: what happens to pictures of another shape. 'resize-naive'
      stretches them; 'letterbox' first adds borders of the last tower's mean
      color until they are square; 'resize-crop' resizes the shorter edge and
      cuts out the center.
    filters: how each tower's input is resampled.
    crop: share of the area that is kept, around the center, of pictures that
      `for_crops` resizes before; see `center_crop`.
  """

  sizes: tuple[int, ...] = (224, 224)
  means: tuple[Color, ...] = (IMAGENET_MEAN, HALF)
  stds: tuple[Color, ...] = (IMAGENET_STD, HALF)
  strategy: Strategy = 'resize-naive'
  filters: tuple[resample.Filter, ...] = ('bicubic', 'bicubic')
  crop: float = 1.0

  def __post_init__(self):
    if self.strategy not in typing.get_args(Strategy):
      raise ValueError(
        f'Pictures cannot be resized by {self.strategy!r}: give one of '
        f'{typing.get_args(Strategy)}.'
      )
    if not 0.0 < self.crop <= 1.0:
      raise ValueError(
        f'A crop of {self.crop} is given, and it is a share of the area, '
        'above 0 and up to 1: OpenVLA-OFT keeps 0.9.'
      )
    counts = [*map(len, (self.sizes, self.means, self.stds, self.filters))]
    if len({*counts}) > 1:
      raise ValueError(
        f'{counts[0]} sizes, {counts[1]} means, {counts[2]} standard '
        f'deviations and {counts[3]} filters are given: each tower needs one '
        'of each.'
      )

  def __call__(self, image, dtype='float32') -> tuple:
    """The input of each tower, [B, size, size, colors].

    Args:
      image: uint8 [B, rows, columns, colors].
      dtype: type of the result.

    Raises:
      ValueError: if pictures are not bytes.
    """
    if image.dtype != jnp.uint8 or image.ndim != 4 or image.shape[-1] != 3:
      raise ValueError(
        'Pictures are uint8 [B, rows, columns, 3], and these are '
        f'{image.dtype} {[*image.shape]}.'
      )
    if self.crop < 1.0:
      size = self.sizes[-1]
      image = center_crop(for_crops(image, size), self.crop, size)
    if self.strategy == 'letterbox':
      image = _letterbox(image, [int(255 * x) for x in self.means[-1]])
    towers = zip(self.sizes, self.means, self.stds, self.filters, strict=True)
    return tuple(
      self._normalized(self._resized(image, size, kind), mean, std, dtype)
      for size, mean, std, kind in towers
    )

  def _resized(self, image, size: int, kind: resample.Filter):
    if self.strategy == 'resize-naive':
      return resample.resize_image(image, (size, size), kind)
    rows, columns = image.shape[1:3]
    short = min(rows, columns)
    shape = tuple(int(size * n / short) for n in (rows, columns))
    image = resample.resize_image(image, shape, kind)
    top, left = (round((n - size) / 2.0) for n in shape)
    return image[:, top : top + size, left : left + size]

  def _normalized(self, image, mean: Color, std: Color, dtype):
    x = image.astype(jnp.float32) / 255.0
    mean, std = (jnp.asarray(c, x.dtype)[None, None, None] for c in (mean, std))
    return ((x - mean) / std).astype(dtype)


def resize_with_pad(image, size: int):
  """Resizes pictures without distortion, and adds black until they are square.

  Bits are those of openpi's client, which takes Pillow's bilinear filter.

  Args:
    image: uint8 [..., rows, columns, colors].
    size: edge of the result, in pixels.
  """
  *leading, rows, columns, colors = image.shape
  ratio = max(rows / size, columns / size)
  shape = int(rows / ratio), int(columns / ratio)
  resized = resample.resize_image(image, shape, 'bilinear')
  above, aside = ((size - n) // 2 for n in shape)
  border = jnp.zeros((*leading, size, size, colors), jnp.uint8)
  at = slice(above, above + shape[0]), slice(aside, aside + shape[1])
  return border.at[(..., *at, slice(None))].set(resized)


def for_crops(image, size: int):
  """Whole pictures as bytes [B, size, size, 3], before a crop.

  The code that trains and evaluates OpenVLA resizes pictures by Lanczos' filter
  as it reads them, in TensorFlow, which rounds once where Pillow does it twice.

  Args:
    image: uint8 [B, rows, columns, 3].
    size: edge of the result, in pixels.
  """
  resize = functools.partial(
    resample.resize_grid, shape=(size, size), antialias=True, kind='lanczos'
  )
  resized = jax.vmap(resize)(image.astype(jnp.float32))
  return jnp.clip(jnp.round(resized), 0.0, 255.0).astype(jnp.uint8)


def center_crop(image, share: float, size: int):
  """The center of pictures, resized to bytes [B, size, size, 3].

  OpenVLA and OpenVLA-OFT evaluate with 90 % of the area. Pixels are sampled as
  by TensorFlow's crop_and_resize: bilinearly, the outermost on the edges of the
  crop. As there, bytes are 255.5 times the result, cut off.

  Args:
    image: uint8 [B, rows, columns, 3].
    share: of the area that is kept.
    size: edge of the result, in pixels.
  """
  start = (1.0 - share**0.5) / 2.0
  at = [
    np.linspace(start * (n - 1), (1.0 - start) * (n - 1), size)
    for n in image.shape[1:3]
  ]
  x = _sampled(image.astype(jnp.float32) / 255.0, at)
  return jnp.clip(x * 255.5, 0.0, 255.0).astype(jnp.uint8)


def random_crop(x, share: float, key):
  """A part of a picture anywhere in it, stretched to the picture's size.

  Pixels are sampled as by `center_crop`.

  Args:
    x: float [rows, columns, 3].
    share: of the area that is kept; of both edges, its root.
    key: a key.
  """
  edge = share**0.5
  start_2 = jax.random.uniform(key, (2,), x.dtype, maxval=1.0 - edge)
  at = [
    (start + edge * jnp.linspace(0.0, 1.0, n, dtype=x.dtype)) * (n - 1)
    for start, n in zip(start_2, x.shape[:2], strict=True)
  ]
  return _sampled(x, at)


def _sampled(x, at):
  """Pictures sampled bilinearly at rows and columns, which may be fractions.

  Args:
    x: float [..., rows, columns, colors].
    at: positions of rows, and of columns, one-dimensional.
  """
  for axis, at_S in zip((-3, -2), at, strict=True):
    last = x.shape[axis] - 1
    low_S = at_S.astype(int)  # Rounds down, as none is below 0.
    shape = [at_S.size if i == axis else 1 for i in range(-x.ndim, 0)]
    weight = jnp.asarray(at_S - low_S, x.dtype).reshape(shape)
    near, far = (
      jnp.take(x, jnp.minimum(low_S + step, last), axis) for step in (0, 1)
    )
    x = near + (far - near) * weight
  return x


def _letterbox(image, color: list[int]):
  """Adds equal borders until the picture is square, but for an odd pixel."""
  rows, columns = image.shape[1:3]
  most = max(rows, columns)
  above, aside = int((most - rows) / 2), int((most - columns) / 2)
  shape = (image.shape[0], rows + 2 * above, columns + 2 * aside, 3)
  border = jnp.broadcast_to(jnp.array(color, jnp.uint8), shape)
  return border.at[:, above : above + rows, aside : aside + columns].set(image)
