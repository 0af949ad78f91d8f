"""Vision transformers: DINOv2 with registers, and SigLIP.

An image is cut into square patches, and each becomes a vector with a position.
Tokens of a class and registers may precede them (arXiv:2304.07193,
arXiv:2309.16588). Layers are bidirectional attention and a feed-forward, both
after a LayerNorm, and scaled before they are added (LayerScale,
arXiv:2103.17239). SigLIP (arXiv:2303.15343) has neither such tokens nor scales.

What else a model knows, such as an instruction, can scale and shift the vectors
inside each layer, see `Film`.

In names of parameters, P is a learned position, I the class token and G a
register. In those of activations, S is any token.
"""

import dataclasses
import functools
import math
import typing
from typing import Any, Literal, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from sharding import rules
from stages import remat as remat_lib
from stages.models import block as block_lib
from stages.models import stack
from stages.models.layers import (
  attention,
  initialize,
  mixed_precision,
  rounding,
)
from stages.models.vision import resample

Activation = Literal['gelu', 'gelu_tanh']
ACTIVATIONS = {
  'gelu': mixed_precision.gelu,
  'gelu_tanh': mixed_precision.gelu_tanh,
}
COLORS = 3


class Film(NamedTuple):
  """Feature-wise linear modulation of each layer, arXiv:1709.07871.

    x ← (1 + γ) x + β

  between attention and feed-forward, equally for all tokens of a row.

  Attributes:
    scale_LBD: γ of each layer that is run.
    shift_LBD: β, likewise.
  """

  scale_LBD: jax.Array
  shift_LBD: jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
  """Dimensions and settings of a vision transformer.

  Attributes:
    image_size: edge of the images that positions were learned on, in pixels.
    patch_size: edge of a patch, in pixels.
    D: width.
    L: number of layers that are run.
    H: number of heads, which divides `D`.
    F: width of the feed-forward.
    has_class: whether a token of the class precedes the patches.
    class_has_position: whether it has a learned position, the first.
    registers: number of registers, between class and patches.
    layer_scale: whether the outputs of attention and feed-forward are scaled.
    final_norm: whether the last layer is followed by a LayerNorm.
    activation: of the feed-forward: the exact GELU, or its approximation.
    antialias: whether positions of a smaller grid are interpolated with
      antialiasing.
    norm_epsilon: ε of LayerNorm.
    dtype: type of the arithmetic; parameters are in float32 or wider.
    remat: as in `stages.models.config.Config`.
    init_stddev: standard deviation of random weights.
  """

  image_size: int
  patch_size: int
  D: int
  L: int
  H: int
  F: int
  has_class: bool = False
  class_has_position: bool = False
  registers: int = 0
  layer_scale: bool = False
  final_norm: bool = True
  activation: Activation = 'gelu_tanh'
  antialias: bool = False
  norm_epsilon: float = 1e-6
  dtype: str = 'float32'
  remat: str = remat_lib.AUTO
  init_stddev: float = 0.02

  @property
  def W(self) -> int:
    """Width of a head."""
    return self.D // self.H

  @property
  def grid(self) -> int:
    """Patches along the edge of an image of `image_size`."""
    return self.image_size // self.patch_size

  @property
  def prefix(self) -> int:
    """Number of tokens before the patches."""
    return self.has_class + self.registers

  @property
  def param_dtype(self):
    """The type that parameters are stored in."""
    return mixed_precision.wide_dtype(jnp.dtype(self.dtype))

  def __post_init__(self):
    if self.D % self.H:
      raise ValueError(
        f'A width of {self.D} cannot be divided among {self.H} heads evenly.'
      )
    if self.image_size % self.patch_size:
      raise ValueError(
        f'Images of {self.image_size} pixels cannot be cut into patches of '
        f'{self.patch_size} evenly.'
      )
    if self.class_has_position and not self.has_class:
      raise ValueError('A position is given for a class token without one.')
    if self.activation not in typing.get_args(Activation):
      raise ValueError(
        f'Activation {self.activation!r} is not one of '
        f'{typing.get_args(Activation)}.'
      )


def inner(config: Config, layers_left_out: int = 1) -> Config:
  """The same model up to an earlier layer, without the norm after the last.

  Models of language and vision often read the patches of the layer before the
  last one, so the last need not be run, nor loaded.
  """
  return dataclasses.replace(
    config, L=config.L - layers_left_out, final_norm=False
  )


class Block(nn.Module):
  """One layer."""

  config: Config

  def setup(self):
    c = self.config
    matrix = functools.partial(block_lib.matrix, self)
    parameter = functools.partial(block_lib.parameter, self)
    self.query_DHW = matrix('query_DHW', c.D, c.H, c.W)
    self.key_DHW = matrix('key_DHW', c.D, c.H, c.W)
    self.value_DHW = matrix('value_DHW', c.D, c.H, c.W)
    self.out_HWD = matrix('out_HWD', c.H, c.W, c.D)
    self.up_DF = matrix('up_DF', c.D, c.F)
    self.down_FD = matrix('down_FD', c.F, c.D)
    self.query_HW = parameter('query_bias_HW', c.H, c.W)
    self.key_HW = parameter('key_bias_HW', c.H, c.W)
    self.value_HW = parameter('value_bias_HW', c.H, c.W)
    self.out_D = parameter('out_bias_D', c.D)
    self.up_F = parameter('up_bias_F', c.F)
    self.down_D = parameter('down_bias_D', c.D)
    self.before_attention = _norm(self, 'before_attention')
    self.before_feedforward = _norm(self, 'before_feedforward')
    if c.layer_scale:
      self.attention_scale_D = parameter('attention_scale_D', c.D)
      self.feedforward_scale_D = parameter('feedforward_scale_D', c.D)

  def _linear(self, name: str, equation: str, x, bias):
    """W x + b, in the dtype of `x`; the sum is rounded once."""
    y = mixed_precision.product(equation, x, getattr(self, name))
    return (y + bias.reshape((1, 1, *bias.shape))).astype(x.dtype)

  def _scaled(self, y_BSD, scale_D):
    if not self.config.layer_scale:
      return y_BSD
    wide = mixed_precision.wide_dtype(y_BSD.dtype)
    return (y_BSD.astype(wide) * scale_D[None, None]).astype(y_BSD.dtype)

  def __call__(self, x_BSD, film: Film | None = None):
    """Activations after the layer; `film` is of this layer alone, [B, D]."""
    c = self.config
    layer_norm = functools.partial(
      mixed_precision.layer_norm, norm_epsilon=c.norm_epsilon
    )
    y_BSD = layer_norm(rules.shard_rows(x_BSD), *self.before_attention)
    to_heads = 'BSD,DHW->BSHW'
    q_BSHW = self._linear('query_DHW', to_heads, y_BSD, self.query_HW)
    k_BSHW = self._linear('key_DHW', to_heads, y_BSD, self.key_HW)
    v_BSHW = self._linear('value_DHW', to_heads, y_BSD, self.value_HW)
    seen_BSHW = attention.bidirectional(q_BSHW, k_BSHW, v_BSHW)
    y_BSD = self._linear('out_HWD', 'BSHW,HWD->BSD', seen_BSHW, self.out_D)
    x_BSD += self._scaled(y_BSD, c.layer_scale and self.attention_scale_D)
    if film is not None:
      x_BSD = _modulate(x_BSD, *film)
    y_BSD = layer_norm(x_BSD, *self.before_feedforward)
    y_BSF = self._linear('up_DF', 'BSD,DF->BSF', y_BSD, self.up_F)
    y_BSF = ACTIVATIONS[c.activation](y_BSF)
    y_BSD = self._linear('down_FD', 'BSF,FD->BSD', y_BSF, self.down_D)
    x_BSD += self._scaled(y_BSD, c.layer_scale and self.feedforward_scale_D)
    return rules.shard_rows(x_BSD), None


class VisionTransformer(nn.Module):
  """Vectors of the patches of images."""

  config: Config

  def setup(self):
    c = self.config
    parameter = functools.partial(block_lib.parameter, self)
    patch = c.D, COLORS, c.patch_size, c.patch_size
    self.patch_DOUU = block_lib.matrix(self, 'patch_DOUU', *patch)
    self.patch_D = parameter('patch_bias_D', c.D)
    places = c.grid**2 + c.class_has_position
    self.position_PD = parameter('position_PD', places, c.D)
    if c.has_class:
      self.class_ID = parameter('class_ID', 1, c.D)
    if c.registers:
      self.register_GD = parameter('register_GD', c.registers, c.D)
    if c.final_norm:
      self.norm = _norm(self, 'norm')
    self.layers = stack.layers(Block, c, 0)

  def embed(self, image):
    """Tokens before the first layer, [B, S, D]; arguments as `__call__`."""
    c = self.config
    B, rows, columns, _ = image.shape
    u = c.patch_size
    if rows % u or columns % u:
      raise ValueError(
        f'An image of {rows} by {columns} pixels cannot be cut into patches of '
        f'{u} evenly: resize it.'
      )
    grid = rows // u, columns // u
    x = image.astype(c.dtype).reshape(B, grid[0], u, grid[1], u, COLORS)
    # Rows and columns of patches, r and c; of pixels within a patch, u and v.
    x = mixed_precision.product('BrucvO,DOuv->BrcD', x, self.patch_DOUU)
    x = x.reshape(B, math.prod(grid), c.D)
    of_class, of_patches = jnp.split(self.position_PD, [c.class_has_position])
    if grid != (c.grid, c.grid):
      square = of_patches.reshape(c.grid, c.grid, c.D)
      square = resample.resize_grid(square, grid, c.antialias)
      of_patches = square.reshape(-1, c.D)
    x += (self.patch_D[None] + of_patches)[None]
    prefix = []
    if c.has_class:
      prefix.append(
        self.class_ID + of_class if len(of_class) else self.class_ID
      )
    if c.registers:
      prefix.append(self.register_GD)
    prefix = [jnp.broadcast_to(y[None], (B, *y.shape)) for y in prefix]
    return jnp.concatenate([*prefix, x], 1).astype(c.dtype)

  def __call__(self, image, film: Film | None = None):
    """Vectors after the last layer that is run, [B, S, D].

    Args:
      image: normalized floats [B, rows, columns, colors]. Sizes other than the
        configured one interpolate the positions.
      film: what scales and shifts the vectors in each layer; None for nothing.

    Returns:
      The class token, registers and patches, row by row; see `patches`.
    """
    x_BSD, _ = self.layers(self.embed(image), film)
    if not self.config.final_norm:
      return x_BSD
    return mixed_precision.layer_norm(
      x_BSD, *self.norm, self.config.norm_epsilon
    )

  def patches(self, image, film: Film | None = None):
    """As `__call__`, without the tokens before the patches."""
    return self(image, film)[:, self.config.prefix :]


def _modulate(x_BSD, scale_BD, shift_BD):
  """(1 + γ) x + β for all tokens of a row, rounded once."""
  wide = mixed_precision.wide_dtype(x_BSD.dtype)
  scale_B1D = 1 + scale_BD.astype(wide)[:, None]
  y_BSD = x_BSD.astype(wide) * scale_B1D + shift_BD.astype(wide)[:, None]
  return y_BSD.astype(x_BSD.dtype)


def _norm(module, name: str):
  """Scale and bias of a LayerNorm."""
  D = module.config.D
  return (
    block_lib.parameter(module, f'{name}_D', D),
    block_lib.parameter(module, f'{name}_bias_D', D),
  )


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once; the result of the model is the same.

  Positions, class token and registers are added in the type that they are
  stored in, so they stay in it, as do biases and scales.
  """
  added = 'position_PD', 'class_ID', 'register_GD'
  return rounding.round_matrices(params, config.dtype, kept=added)


def param_shapes(config: Config) -> Any:
  """Shapes and types of the parameters."""
  size = config.image_size
  model = VisionTransformer(config)
  image = jnp.zeros((1, size, size, COLORS), config.dtype)
  return jax.eval_shape(model.init, jax.random.key(0), image)['params']


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Any:
  """Random parameters: normal matrices, scales of one, biases of zero."""
  return initialize.draw(param_shapes(config), key, config.init_stddev)
