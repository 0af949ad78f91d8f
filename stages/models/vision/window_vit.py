"""The vision tower of Qwen2.5-VL, arXiv:2502.13923.

Its layers are those of the language model, with biases. A patch attends to its
window of 8 x 8 patches, and in a few layers to its whole picture. Half of each
head turns by the row of a patch, half by its column. In the end, squares of
2 x 2 patches become one vector each, as wide as the language model.

All pictures of a row are one sequence, and masks keep them apart. Windows are
masks, too: a layer computes the scores of all pairs of patches of a row.
"""

from flax import linen as nn
import jax.numpy as jnp

from stages.models import block as block_lib
from stages.models import config as config_lib
from stages.models import stack
from stages.models.layers import attention, mixed_precision
from stages.models.layers import rope as rope_lib
from stages.models.vision import patches

# Windows of a picture along an edge, at most.
_MOST = 1024


def layer_config(config: config_lib.Config) -> config_lib.Config:
  """The layers of the tower of a model."""
  v = config.vision
  return config_lib.Config(
    V=1,
    D=v.D,
    L=v.L,
    H=v.H,
    K=v.H,
    W=v.D // v.H,
    F=v.F,
    norm_epsilon=v.norm_epsilon,
    qkv_bias=True,
    out_bias=True,
    feedforward_bias=True,
    dtype=config.dtype,
    remat=config.remat,
    max_live_scores=config.max_live_scores,
  )


class Merger(nn.Module):
  """Two affine maps with an exact GELU between them, of [B, S, O]."""

  config: config_lib.Config

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1]
    for name, letters, shape in (
      ('in', 'OF', (width, width)),
      ('out', 'FD', (width, self.config.D)),
    ):
      if name == 'out':
        x = mixed_precision.gelu(x)
      weight = block_lib.matrix(self, f'{name}_{letters}', *shape)
      bias = block_lib.parameter(self, f'{name}_bias_{letters[1]}', shape[1])
      y = mixed_precision.product('bsi,io->bso', x, weight)
      x = (y + bias[None, None]).astype(x.dtype)
    return x


class WindowTower(nn.Module):
  """Vectors of the squares of pictures."""

  config: config_lib.Config

  def setup(self):
    c, v = self.config, self.config.vision
    shape = v.D, patches.COLORS, v.frames, v.patch_size, v.patch_size
    self.patch_DOTUU = block_lib.matrix(self, 'patch_DOTUU', *shape)
    in_axes = 0, nn.broadcast, nn.broadcast
    self.layers = stack.layers(block_lib.Block, layer_config(c), in_axes)
    self.norm_D = block_lib.parameter(self, 'norm_D', v.D)
    self.merger = Merger(c)

  def embed(self, pictures: patches.Pictures):
    """Vectors of patches before the first layer, [B, S, D]."""
    x = patches.normalized(pictures.patch, self.config.vision)
    # Rows u and columns v of pixels; each frame T shows the same picture.
    x = jnp.repeat(x[:, :, :, None], self.config.vision.frames, axis=3)
    x_BSD = mixed_precision.product(
      'BSOTuv,DOTuv->BSD', x.astype(self.config.dtype), self.patch_DOTUU
    )
    return x_BSD.astype(self.config.dtype)

  def encode(self, pictures: patches.Pictures):
    """Vectors of patches after the last layer, [B, S, D]."""
    v = self.config.vision
    is_window_L = jnp.array([i not in v.full_layers for i in range(v.L)])
    x_BSD, _ = self.layers(
      self.embed(pictures), is_window_L, *contexts(v, pictures.place)
    )
    return x_BSD

  def merge(self, x_BSD):
    """Vectors of squares, [B, S / 4, width of the language model]."""
    v = self.config.vision
    x_BSD = mixed_precision.rms_norm(x_BSD, self.norm_D, v.norm_epsilon)
    B, S, D = x_BSD.shape
    return self.merger(x_BSD.reshape(B, S // v.merge**2, D * v.merge**2))

  def __call__(self, pictures: patches.Pictures):
    return self.merge(self.encode(pictures))


def contexts(
  v: config_lib.VisionConfig, place_BSX
) -> tuple[attention.Context, attention.Context]:
  """Angles and masks of layers that see whole pictures, and windows."""
  picture_BS, row_BS, column_BS = jnp.moveaxis(place_BSX, -1, 0)
  width = v.D // v.H // 2
  angles = zip(
    *(rope_lib.angles(v.rope, width, x) for x in (row_BS, column_BS)),
    strict=True,
  )
  cos_BSR, sin_BSR = (jnp.concatenate(halves, -1) for halves in angles)
  window_BS = picture_BS * _MOST + row_BS // v.window
  window_BS = window_BS * _MOST + column_BS // v.window
  is_patch_BS = picture_BS >= 0

  def context(group_BS):
    segment = attention.Segment(group_BS, None)
    mask = attention.Mask(
      is_patch_BS,
      attention.Bidirectional(),
      segment_BT=segment,
      segment_BC=segment,
    )
    return attention.Context(cos_BSR, sin_BSR, mask)

  return context(picture_BS), context(window_BS)
