"""OpenVLA, arXiv:2406.09246: two vision towers, a projector and Llama 2.

The patches of a picture, as DINOv2 and SigLIP see them before their last layer,
are concatenated feature by feature and projected to the width of the language
model. They stand after its first token, and the instruction follows.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import types
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import base
from stages.language import value_model
from stages.models import block as block_lib
from stages.models import transformer
from stages.models.layers import initialize, mixed_precision, rope, rounding
from stages.models.vision import vit
from stages.vla import augmentation
from stages.vla import pictures as pictures_lib
from stages.vla.openvla import action_tokens

# The published towers.
DINO = vit.Config(
  image_size=224,
  patch_size=14,
  D=1024,
  L=24,
  H=16,
  F=4096,
  has_class=True,
  registers=4,
  layer_scale=True,
  activation='gelu',
)
SIGLIP = vit.Config(
  image_size=224, patch_size=14, D=1152, L=27, H=16, F=4304, activation='gelu'
)


@dataclasses.dataclass(frozen=True)
class Config:
  """The parts of a model.

  Attributes:
    dino: the first vision tower, as published; its last layer is not run.
    siglip: the second one, of as many patches, likewise.
    llama: the language model.
    padded: tokens at the end of the vocabulary that pad its size; those before
      them are the action tokens.
    bins: number of action tokens.
    pictures: pre-processing of pictures.
  """

  dino: vit.Config
  siglip: vit.Config
  llama: transformer.Config
  padded: int = 64
  bins: int = 256
  pictures: pictures_lib.Pictures = pictures_lib.Pictures()

  @property
  def tokens(self) -> action_tokens.ActionTokens:
    """The tokens of actions."""
    return action_tokens.ActionTokens(self.llama.V - self.padded, self.bins)

  def __post_init__(self):
    if self.dino.grid != self.siglip.grid:
      raise ValueError(
        f'DINOv2 has {self.dino.grid} patches along an edge and SigLIP '
        f'{self.siglip.grid}: their features are joined patch by patch, so '
        'give both as many.'
      )
    sizes = self.dino.image_size, self.siglip.image_size
    if sizes != self.pictures.sizes:
      raise ValueError(
        f'Pictures are resized to {self.pictures.sizes} pixels, and the towers '
        f'see {sizes}: give `pictures` the same sizes.'
      )
    _ = self.tokens  # Refuses more bins than tokens.


def published(**settings) -> Config:
  """The sizes of openvla-7b: DINOv2-L, SigLIP-So400m and Llama 2 7B.

  Args:
    **settings: of towers and language model: `dtype` and `remat`.
  """
  return Config(
    dataclasses.replace(DINO, **settings),
    dataclasses.replace(SIGLIP, **settings),
    transformer.Config(
      V=32_064,
      D=4096,
      L=32,
      H=32,
      K=32,
      W=128,
      F=11_008,
      rope=rope.RopeConfig(theta=1e4, original_context=2048),
      max_positions=2048,
      qkv_bias=False,
      tie_embeddings=False,
      **settings,
    ),
  )


@dataclasses.dataclass(frozen=True)
class ProjectorConfig:
  """Dimensions of the projector, see `Projector`.

  Attributes:
    O: features of a patch.
    D: width of the language model.
    dtype: type of the arithmetic.
    param_dtype: the type that parameters are stored in.
  """

  O: int
  D: int
  dtype: str
  param_dtype: Any


class Projector(nn.Module):
  """Three linear maps with exact GELUs between them, [B, S, O] to [B, S, D]."""

  config: ProjectorConfig

  @nn.compact
  def __call__(self, x):
    c = self.config
    width = 4 * c.O
    layers = (
      ('in', 'OF', (c.O, width)),
      ('middle', 'FD', (width, c.D)),
      ('out', 'OD', (c.D, c.D)),
    )
    for name, letters, shape in layers:
      if name != 'in':
        x = mixed_precision.gelu(x)
      weight = block_lib.matrix(self, f'{name}_{letters}', *shape)
      bias = block_lib.parameter(self, f'{name}_bias_{letters[1]}', shape[1])
      y = mixed_precision.product('bsi,io->bso', x, weight)
      x = (y + bias[None, None]).astype(x.dtype)
    return x


def projector(config: Config) -> Projector:
  """The projector of a model."""
  c = config.llama
  width = config.dino.D + config.siglip.D
  return Projector(ProjectorConfig(width, c.D, c.dtype, c.param_dtype))


def param_shapes(config: Config) -> Any:
  """Shapes and types of the parameters, by part."""
  fuse = projector(config)
  x = jnp.zeros((1, 1, fuse.config.O), config.llama.dtype)
  return {
    'dino': vit.param_shapes(vit.inner(config.dino)),
    'siglip': vit.param_shapes(vit.inner(config.siglip)),
    'projector': jax.eval_shape(fuse.init, jax.random.key(0), x)['params'],
    'llama': transformer.param_shapes(config.llama),
  }


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Any:
  """Random parameters, by part."""
  shapes = param_shapes(config)
  stddev = config.llama.init_stddev
  keys = jax.random.split(key, len(shapes))
  return {
    part: initialize.draw(shapes[part], key, stddev)
    for part, key in zip(shapes, keys, strict=True)
  }


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once, by part; the result of the model is the same.

  Parts that OpenVLA does not have, such as a critic, stay as they are.
  """
  project = functools.partial(rounding.round_matrices, dtype=config.llama.dtype)
  rounds = {
    'dino': functools.partial(vit.compute_params, config.dino),
    'siglip': functools.partial(vit.compute_params, config.siglip),
    'projector': project,
    'llama': functools.partial(transformer.compute_params, config.llama),
  }
  return params | {k: f(params[k]) for k, f in rounds.items() if k in params}


def augmented(config: Config) -> tuple[Config, Callable]:
  """For training on pictures that are changed at random.

  Returns:
    The model without its central crop, which random ones replace, and
    `images, key_B -> images`, see `augmentation.OpenVla`.

  Raises:
    ValueError: if the model does not see the center of pictures elsewhere.
  """
  share = config.pictures.crop
  if share == 1.0:
    raise ValueError(
      'Pictures are to be cropped at random in training, and not in the center '
      'elsewhere: set center_crop = True, or augment = False.'
    )
  change = augmentation.OpenVla(crop=share)
  whole = dataclasses.replace(config.pictures, crop=1.0)

  def changed(images: Sequence[jax.Array], key_B) -> tuple[jax.Array, ...]:
    return tuple(
      change(
        pictures_lib.for_crops(image, whole.sizes[-1]),
        jax.vmap(jax.random.fold_in, (0, None))(key_B, i),
      )
      for i, image in enumerate(images)
    )

  return dataclasses.replace(config, pictures=whole), changed


def embed_patches(
  config: Config,
  params,
  image,
  films: Mapping[str, vit.Film] = types.MappingProxyType({}),
):
  """Projected patches [B, S, D] of pictures.

  Args:
    config: the model.
    params: its parameters.
    image: uint8 [B, rows, columns, 3].
    films: by the name of a tower, what scales and shifts its vectors.
  """
  inputs = config.pictures(image, config.llama.dtype)
  towers = [
    vit.VisionTransformer(vit.inner(tower)).apply(
      {'params': params[name]}, x, films.get(name), method='patches'
    )
    for name, tower, x in zip(
      ('dino', 'siglip'), (config.dino, config.siglip), inputs, strict=True
    )
  ]
  x = jnp.concatenate(towers, -1).astype(config.llama.dtype)
  return projector(config).apply({'params': params['projector']}, x)


def insert_patches(first, patches):
  """Puts one array for the patches of each row after its first token's.

  Args:
    first: an array of tokens, [B, P, …].
    patches: one of patches, [B, S, …].
  """
  return jnp.concatenate([first[:, :1], patches, first[:, 1:]], 1)


def embed_prompt(config: Config, params, image, token_BP):
  """Vectors [B, S, D] of a prompt with a picture."""
  model = transformer.Transformer(config.llama)
  x_BPD = model.apply({'params': params['llama']}, token_BP, method='embed')
  return insert_patches(x_BPD, embed_patches(config, params, image))


def last_states(x_BPD, mask_BP):
  """The state after the last token of each prompt, [B, 1, D]."""
  length_B = mask_BP.sum(1, dtype=jnp.int32)
  is_last_BP = transformer.positions(mask_BP) == length_B[:, None] - 1
  is_last_BP &= mask_BP > 0
  at_B11 = jnp.argmax(is_last_BP, axis=1)[:, None, None]
  return jnp.take_along_axis(x_BPD, at_B11, axis=1)


def action_logits(config: Config, params, x_BTD):
  """Logits of the action tokens alone, [B, T, bins]."""
  tokens, llama = config.tokens, params['llama']
  name = transformer.output_names(config.llama)[1]
  axis = 0 if config.llama.tie_embeddings else 1
  own = {
    'norm_D': llama['norm_D'],
    name: jax.lax.slice_in_dim(
      llama[name], tokens.start, tokens.end, axis=axis
    ),
  }
  return transformer.output_logits(config.llama, own, x_BTD)


def values(config: Config, params, x_B1D):
  """Values [B] or [B, Z] by the critic's head, from states of one position."""
  head = {
    'norm_D': params['llama']['norm_D'],
    base.CRITIC: params[base.CRITIC],
  }
  return value_model.head_values(config.llama, head, x_B1D)[:, 0]
