"""Random changes of pictures while a robot's policy is fine-tuned.

They are those of the published training of OpenVLA, which computes them by
TensorFlow, and of openpi, which does it by augmax, as here. Each row has a key
of its own, so that its pictures do not depend on the batch.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from stages.vla import pictures


@dataclasses.dataclass(frozen=True)
class OpenVla:
  """Crops and colors of OpenVLA and OpenVLA-OFT, in this order.

  Published training draws all numbers of a picture from one seed, so that its
  crops lie on the diagonal; here they are independent.

  Attributes:
    crop: share of the area that a crop keeps. It is stretched to the size of
      the picture.
    brightness: largest change, where white is 1.
    contrast: largest change of the factor about a picture's mean.
    saturation: largest change of the factor of saturation.
    hue: largest turn of the hue, where 1 is a whole one.
  """

  crop: float = 0.9
  brightness: float = 0.2
  contrast: float = 0.2
  saturation: float = 0.2
  hue: float = 0.05

  def __post_init__(self):
    _require_augmax()

  def __call__(self, image, key_B):
    """Changed pictures, uint8 [B, rows, columns, 3] as given.

    Args:
      image: uint8 [B, rows, columns, 3].
      key_B: one key a picture.
    """
    changed = jax.vmap(self._one)(image.astype(jnp.float32) / 255.0, key_B)
    return (changed * 255.0).astype(jnp.uint8)  # Cut off, as published.

  def _one(self, x, key):
    """One picture, float32 in 0 … 1."""
    keys = jax.random.split(key, 5)
    draw = lambda i, size: jax.random.uniform(keys[i], (), x.dtype, -size, size)
    x = pictures.random_crop(x, self.crop, keys[0])
    x = jnp.clip(x + draw(1, self.brightness), 0.0, 1.0)
    mean = x.mean((0, 1), keepdims=True)
    x = jnp.clip(mean + (x - mean) * (1.0 + draw(2, self.contrast)), 0.0, 1.0)
    factor, turn = 1.0 + draw(3, self.saturation), draw(4, self.hue)
    recolored = functools.partial(_recolored, factor=factor, turn=turn)
    return jax.vmap(jax.vmap(recolored))(x)


@dataclasses.dataclass(frozen=True)
class Openpi:
  """Crops, rotations and colors of openpi, in this order.

  Colors change in half of the pictures, hues too, by augmax's defaults.

  Attributes:
    crop: share of the width and of the height that a crop keeps.
    degrees: largest rotation. Pictures of cameras at a wrist are neither
      cropped nor rotated.
    brightness: as of augmax's `ColorJitter`.
    contrast: likewise.
    saturation: likewise; without effect in augmax 0.4.1.
  """

  crop: float = 0.95
  degrees: float = 5.0
  brightness: float = 0.3
  contrast: float = 0.4
  saturation: float = 0.5

  def __post_init__(self):
    _require_augmax()

  def __call__(self, image, key_B, *, at_wrist: bool):
    """Changed pictures, of the shape of those given.

    Args:
      image: float32 [B, rows, columns, 3] in 0 … 1.
      key_B: one key a picture.
      at_wrist: whether the camera is at a wrist.
    """
    import augmax

    height, width = image.shape[1:3]
    changes = []
    if not at_wrist:
      changes += [
        augmax.RandomCrop(int(width * self.crop), int(height * self.crop)),
        augmax.Resize(width, height),
        augmax.Rotate((-self.degrees, self.degrees)),
      ]
    changes.append(
      augmax.ColorJitter(
        brightness=self.brightness,
        contrast=self.contrast,
        saturation=self.saturation,
      )
    )
    return jax.vmap(augmax.Chain(*changes))(key_B, image)


def _recolored(pixel, *, factor, turn):
  """A pixel whose saturation is multiplied and whose hue is turned."""
  from augmax import utils

  hue, saturation, value = utils.rgb_to_hsv(pixel)
  saturation = jnp.clip(saturation * factor, 0.0, 1.0)
  return utils.hsv_to_rgb(hue + turn, saturation, value)


def _require_augmax():
  """Refuses augmentation where its library is missing."""
  if importlib.util.find_spec('augmax') is None:
    raise ImportError(
      'Random changes of pictures need augmax: pip install '
      '"rlinf-jax[augmentation]", or leave pictures as they are.'
    )
