"""A convolutional network that turns what is seen into a vector.

Three layers by default, as in https://doi.org/10.1038/nature14236 (methods,
model architecture), with 256 features in the end as ManiSkill's PPO from
pictures has them. Or what the last layer finds is told by where it is, which
is called a spatial softmax (arXiv:1504.00702, section 4.1) and has much less to
learn. Every camera has a network of its own, so that cameras may
differ in size and in what they are good for.
"""

import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import tree_paths
from stages.models import mlp

SHARP = 4.0  # Inverse temperature of a spatial softmax, to begin with.


@dataclasses.dataclass(frozen=True)
class Config:
  """The shape of the network of a camera, in the letters of `stages/base.py`.

  Attributes:
    channels: of each layer.
    kernel_sizes: pixels along an edge that a layer looks at a time.
    strides: pixels from one window to the next.
    features: width of a dense output layer; None for a spatial softmax, which
      returns two features per channel: the expected row and column, −1 … 1
      downwards and to the right.
  """

  channels: tuple[int, ...] = (32, 64, 64)
  kernel_sizes: tuple[int, ...] = (8, 4, 3)
  strides: tuple[int, ...] = (4, 2, 1)
  features: int | None = 256


class Encoder(nn.Module):
  """What cameras see and what is told besides, as one vector.

  Bytes of 0 to 255 are colors, taken as 0 to 1. Vectors are left as they are.
  """

  config: Config
  cameras: tuple[str, ...]
  vectors: tuple[str, ...]

  @nn.compact
  def __call__(self, obs):
    """`a tree of [..., rows, columns, colors] and [..., O] -> [..., O]`."""
    leaves = tree_paths.flatten(obs)
    made = [
      CameraEncoder(self.config, name=camera.replace('/', '_'))(leaves[camera])
      for camera in self.cameras
    ]
    return jnp.concatenate([*made, *(leaves[n] for n in self.vectors)], -1)


class CameraEncoder(nn.Module):
  """The network of a camera."""

  config: Config

  @nn.compact
  def __call__(self, picture):
    """`[..., rows, columns, colors] in bytes -> [..., D]`."""
    c, ahead = self.config, picture.shape[:-3]
    x = picture.reshape(-1, *picture.shape[-3:])
    x = x.astype(jnp.result_type(float)) / 255.0
    last = len(c.channels) - 1
    shapes = zip(c.channels, c.kernel_sizes, c.strides, strict=True)
    for i, (channels, window, stride) in enumerate(shapes):
      shape = window, window, x.shape[-1], channels
      x = _convolve(self, x, f'layer{i}', shape, stride)
      x = x if c.features is None and i == last else jax.nn.relu(x)
    if c.features is None:
      initial = nn.initializers.constant(SHARP)
      x = _where(x * self.param('sharpness', initial, ()))
      return x.reshape(*ahead, x.shape[-1])
    x = x.reshape(*ahead, math.prod(x.shape[1:]))
    shape = x.shape[-1], c.features
    return jax.nn.relu(mlp.layer(self, x, 'out', 'OD', shape, 2**0.5))


def _where(x):
  """Mean row and column of each channel, as if `exp x` were its weight.

  `[B, rows, columns, channels] -> [B, 2 · channels]`, rows first.
  """
  B, rows, columns, F = x.shape
  share = jax.nn.softmax(x.reshape(B, -1, F), axis=1).reshape(x.shape)
  lines = (jnp.linspace(-1.0, 1.0, n, dtype=x.dtype) for n in (rows, columns))
  means = (
    (share.sum(axis) * line[None, :, None]).sum(1)
    for axis, line in zip((2, 1), lines, strict=True)
  )
  return jnp.concatenate([*means], -1)


def _convolve(module, x, name: str, shape, stride: int):
  """A layer of windows, with orthogonal weights to begin with."""
  weight_UUOF = module.param(
    f'{name}_UUOF', nn.initializers.orthogonal(2**0.5), shape
  )
  bias_F = module.param(f'{name}_bias_F', nn.initializers.zeros, shape[-1:])
  x = jax.lax.conv_general_dilated(
    x,
    weight_UUOF,
    (stride, stride),
    'VALID',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  return x + bias_F[None, None, None]


def encoder(like, config: Config, ignored: tuple[str, ...] = ()) -> Encoder:
  """The encoder for observations that look like these.

  Args:
    like: shapes of one observation, a tree of pictures and vectors by name.
    config: of the network of each camera.
    ignored: names of what it shall not read.

  Raises:
    ValueError: if there is something that it cannot read.
  """
  cameras, vectors = [], []
  for name, x in tree_paths.flatten(like).items():
    if name in ignored:
      continue
    if x.dtype == jnp.uint8 and len(x.shape) == 3:
      _fits(name, x.shape, config)
      cameras.append(name)
    elif jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) == 1:
      vectors.append(name)
    else:
      raise ValueError(
        f'This policy reads pictures, uint8 [rows, columns, colors], and '
        f'vectors of numbers, and the world shows {name!r}, {x.dtype} '
        f'{[*x.shape]}: name it in `ignored` if it can be done without.'
      )
  return Encoder(config, tuple(cameras), tuple(vectors))


def _fits(name: str, shape, config: Config):
  """Refuses pictures in which a window finds no room."""
  left = min(shape[:2])
  for window, stride in zip(config.kernel_sizes, config.strides, strict=True):
    if left < window:
      raise ValueError(
        f'{name!r} is {shape[0]} pixels by {shape[1]}, too small for windows '
        f'of {config.kernel_sizes} at strides of {config.strides}: give '
        '`cnn.Config` smaller ones, or the camera more pixels.'
      )
    left = (left - window) // stride + 1
