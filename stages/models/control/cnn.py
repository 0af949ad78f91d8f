"""A convolutional encoder that turns observations into one vector.

By default three layers as in https://doi.org/10.1038/nature14236 (methods,
model architecture) and a dense layer of 256 features, as in ManiSkill's PPO
from images. Alternatively the last layer ends in a spatial softmax
(arXiv:1504.00702, section 4.1), which has far fewer parameters. Every camera
has a network of its own, so cameras may differ in size and content.
"""

import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import tree_paths
from stages.models.control import mlp

SHARPNESS = 4.0  # Initial inverse temperature of a spatial softmax.


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of a camera's network.

  Attributes:
    channels: output channels of each layer.
    kernel_sizes: edge of each layer's kernel, in pixels.
    strides: stride of each layer, in pixels.
    features: width of a dense output layer; None for a spatial softmax, which
      returns two features per channel: the expected row and column, −1 … 1
      downwards and to the right.
  """

  channels: tuple[int, ...] = (32, 64, 64)
  kernel_sizes: tuple[int, ...] = (8, 4, 3)
  strides: tuple[int, ...] = (4, 2, 1)
  features: int | None = 256


class Encoder(nn.Module):
  """Concatenates encoded images and vector observations.

  Image bytes 0 … 255 are scaled to 0 … 1. Vectors are left as they are.

  Attributes:
    config: of each camera's network.
    cameras: paths of image observations.
    vectors: paths of vector observations.
  """

  config: Config
  cameras: tuple[str, ...]
  vectors: tuple[str, ...]

  @nn.compact
  def __call__(self, obs):
    """`a tree of [..., rows, columns, colors] and [..., O] -> [..., O]`."""
    leaves = tree_paths.flatten(obs)
    features = [
      CameraEncoder(self.config, name=camera.replace('/', '_'))(leaves[camera])
      for camera in self.cameras
    ]
    return jnp.concatenate([*features, *(leaves[n] for n in self.vectors)], -1)


class CameraEncoder(nn.Module):
  """The network of a camera."""

  config: Config

  @nn.compact
  def __call__(self, image):
    """`uint8 [..., rows, columns, colors] -> [..., features]`."""
    c, leading = self.config, image.shape[:-3]
    x = image.reshape(-1, *image.shape[-3:])
    x = x.astype(jnp.result_type(float)) / 255.0
    last = len(c.channels) - 1
    shapes = zip(c.channels, c.kernel_sizes, c.strides, strict=True)
    for i, (channels, kernel, stride) in enumerate(shapes):
      shape = kernel, kernel, x.shape[-1], channels
      x = _convolve(self, x, f'layer{i}', shape, stride)
      x = x if c.features is None and i == last else jax.nn.relu(x)
    if c.features is None:
      initial = nn.initializers.constant(SHARPNESS)
      x = _spatial_softmax(x * self.param('sharpness', initial, ()))
      return x.reshape(*leading, x.shape[-1])
    x = x.reshape(*leading, math.prod(x.shape[1:]))
    shape = x.shape[-1], c.features
    return jax.nn.relu(mlp.layer(self, x, 'out', 'OD', shape, 2**0.5))


def _spatial_softmax(x):
  """Expected row and column of each channel under a softmax over pixels.

  `[B, rows, columns, channels] -> [B, 2 · channels]`, rows first, −1 … 1.
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
  """A convolution without padding; its weights are initialized orthogonally."""
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


def encoder(obs_spec, config: Config, ignored: tuple[str, ...] = ()) -> Encoder:
  """Makes the encoder of an environment's observations.

  Args:
    obs_spec: shapes of one observation, a tree of images and vectors.
    config: of each camera's network.
    ignored: paths of observations that it does not read.

  Raises:
    ValueError: if an observation is neither an image nor a vector, or an image
      is smaller than a kernel.
  """
  cameras, vectors = [], []
  for name, x in tree_paths.flatten(obs_spec).items():
    if name in ignored:
      continue
    if x.dtype == jnp.uint8 and len(x.shape) == 3:
      _check_size(name, x.shape, config)
      cameras.append(name)
    elif jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) == 1:
      vectors.append(name)
    else:
      raise ValueError(
        'This policy reads images, uint8 [rows, columns, colors], and float '
        f'vectors, and the environment returns {name!r}, {x.dtype} '
        f'{[*x.shape]}: add it to `ignored` if the policy can do without.'
      )
  return Encoder(config, tuple(cameras), tuple(vectors))


def _check_size(name: str, shape, config: Config):
  """Refuses images that are smaller than a layer's kernel."""
  left = min(shape[:2])
  for kernel, stride in zip(config.kernel_sizes, config.strides, strict=True):
    if left < kernel:
      raise ValueError(
        f'{name!r} is {shape[0]} pixels by {shape[1]}, too small for '
        f'kernels of {config.kernel_sizes} at strides of {config.strides}: '
        'make them smaller in `cnn.Config`, or the image larger.'
      )
    left = (left - kernel) // stride + 1
