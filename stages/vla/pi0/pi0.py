"""The networks of π0 and π0.5: a vision-language model and an action expert.

π0 (arXiv:2410.24164) has two transformers of equally many layers. The first,
PaliGemma, reads images and an instruction: the prefix. The second, smaller one
reads the robot's state and a chunk of noisy actions, attends to the keys of
both, and predicts the velocity of flow matching. The prefix does not attend to
the actions, so its keys and values are computed once for all denoising steps.

In π0, the state is a token, and the time is mixed into each action's token. In
π0.5 (arXiv:2504.16054), the state is part of the instruction, and the time
conditions the norms of the expert.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from stages.models import block as block_lib
from stages.models import config as config_lib
from stages.models import stack, transformer
from stages.models.control import flow_matching
from stages.models.layers import (
  attention,
  initialize,
  mixed_precision,
  rounding,
)
from stages.models.vision import vit
from stages.vla.pi0 import adaptive


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of both networks; letters as in `stages/base.py`.

  Attributes:
    vision: SigLIP, the encoder of images.
    trunk: the language model of the prefix.
    expert: the transformer of actions, of as many layers and equal heads. It
      has no embedding; `V` is ignored.
    Z: actions of a chunk.
    A: dimensions of an action, padded to those of the robot with most of them.
    O: features of the state, likewise; ignored by π0.5.
    adaptive: whether the time conditions the norms of the expert, and the state
      is in the instruction: π0.5. Otherwise π0.
  """

  vision: vit.Config
  trunk: config_lib.Config
  expert: config_lib.Config
  Z: int = 50
  A: int = 32
  O: int = 32
  adaptive: bool = False

  def __post_init__(self):
    for name in 'LKHW':
      ours, theirs = getattr(self.trunk, name), getattr(self.expert, name)
      if ours != theirs:
        raise ValueError(
          f'Trunk and expert share attention, so {name} must be equal, and is '
          f'{ours} of the trunk and {theirs} of the expert.'
        )

  @property
  def block(self) -> block_lib.Block:
    """A layer of the expert."""
    block = adaptive.Block if self.adaptive else block_lib.Block
    return block(self.expert)


GEMMA = functools.partial(
  config_lib.Config,
  L=18,
  H=8,
  K=1,
  W=256,
  rope=transformer.rope_lib.RopeConfig(theta=1e4),
  qkv_bias=False,
  activation='gelu_tanh',
  unit_offset=True,
  scale_embeddings=True,
)


def published(*, adaptive: bool = False, **settings) -> Config:
  """The published sizes: SigLIP-So400m, Gemma 2B and an expert of 300M.

  Args:
    adaptive: π0.5 instead of π0.
    settings: of all transformers: `dtype` and `remat`.
  """
  tower = vit.Config(
    image_size=224, patch_size=14, D=1152, L=27, H=16, F=4304, **settings
  )
  return Config(
    tower,
    GEMMA(V=257_152, D=2048, F=16_384, **settings),
    GEMMA(V=1, D=1024, F=4096, **settings),
    adaptive=adaptive,
  )


class Prefix(NamedTuple):
  """Results of the trunk that all denoising steps read.

  Attributes:
    cache: keys and values of each layer.
    output: the trunk's activations after its last layer, before its norm.
    mask: true on tokens, false on padding and absent images.
  """

  cache: attention.PromptCache
  output: Float[Array, 'B P D']
  mask: Bool[Array, 'B P']


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once, by part; the result of the model is the same.

  Of the expert, these are the matrices of its layers: actions, the state and
  the time are mapped in float32. Parts that are not the model's stay as they
  are.
  """
  project = functools.partial(
    rounding.round_matrices, dtype=config.vision.dtype
  )
  in_layers = functools.partial(rounding.round_matrices, kept=adaptive.MATRICES)
  rounds = {
    'vision': functools.partial(vit.compute_params, config.vision),
    'projector': project,
    'trunk': functools.partial(transformer.compute_params, config.trunk),
    'expert': lambda expert: (
      expert | {'layers': in_layers(expert['layers'], config.expert.dtype)}
    ),
  }
  return params | {k: f(params[k]) for k, f in rounds.items() if k in params}


def embed_images(config: Config, params, image):
  """Embeddings of images' patches, as the trunk reads them, [B, P, D].

  Args:
    config: sizes.
    params: of both networks.
    image: floats −1 … 1, [B, rows, columns, colors].
  """
  tower = vit.VisionTransformer(config.vision)
  return _affine(
    params['projector'],
    'out_OD',
    tower.apply({'params': params['vision']}, image),
  )


def embed_tokens(config: Config, params, token_BT):
  """Embeddings of an instruction's tokens, as the trunk reads them."""
  model = transformer.Transformer(config.trunk)
  return model.apply({'params': params['trunk']}, token_BT, method='embed')


def encode(config: Config, params, x_BPD, is_token_BP) -> Prefix:
  """Runs the trunk on a prefix, each of whose tokens attends to all of them.

  Args:
    config: sizes.
    params: of both networks.
    x_BPD: embeddings of images and instruction.
    is_token_BP: false on padding and absent images.
  """
  mask = attention.Mask(is_token_BP, attention.Bidirectional())
  output_BPD, cache = stack.run(
    block_lib.Block(config.trunk),
    params['trunk']['layers'],
    x_BPD.astype(config.trunk.dtype),
    transformer.positions(is_token_BP),
    mask,
  )
  return Prefix(cache, output_BPD, is_token_BP)


def velocity(config: Config, params, prefix: Prefix, state_BO, x_BZA, t_B):
  """The velocity of noisy actions, in float32 or wider, [B, Z, A].

  Arguments are those of `expert_states`.
  """
  y_BZD = expert_states(config, params, prefix, state_BO, x_BZA, t_B)
  return velocity_of(params, y_BZD)


def velocity_of(params, y_BZD):
  """The velocity from the last states of the expert."""
  return _affine(params['expert'], 'action_out_DA', y_BZD)


def expert_states(config: Config, params, prefix: Prefix, state_BO, x_BZA, t_B):
  """The expert's last states at noisy actions, float32 or wider, [B, Z, D].

  Args:
    config: sizes.
    params: of both networks.
    prefix: of `encode`.
    state_BO: the robot's state, normalized; not read by π0.5.
    x_BZA: noisy actions.
    t_B: time, 1 at noise and 0 at actions.
  """
  expert = params['expert']
  y_BTD, condition = _suffix(config, expert, state_BO, x_BZA, t_B)
  (B, P), T = prefix.mask.shape, y_BTD.shape[1]
  mask = attention.Mask(
    jnp.concatenate([prefix.mask, jnp.ones((B, T), bool)], axis=1),
    attention.Bidirectional() if config.adaptive else _state_first(B, P, T),
  )
  start_B = prefix.mask.sum(1, dtype=jnp.int32)
  y_BTD, _ = stack.run(
    config.block,
    expert['layers'],
    y_BTD.astype(config.expert.dtype),
    start_B[:, None] + jnp.arange(T)[None],
    mask,
    prefix=prefix.cache,
    condition=condition,
  )
  y_BZD = y_BTD[:, -config.Z :]
  if config.adaptive:
    y_BZD = adaptive.norm(
      expert, 'norm', y_BZD, condition, config.expert.norm_epsilon
    )
  else:
    y_BZD = block_lib.rms_norm(config.expert, y_BZD, expert['norm_D'])
  wide = mixed_precision.wide_dtype(y_BZD.dtype)
  return y_BZD.astype(wide)


def _state_first(B: int, P: int, T: int) -> attention.Blocks:
  """Blocks of T tokens after a prefix of P: the state, then all actions.

  The state does not attend to the actions.
  """
  block_BT = jnp.broadcast_to(jnp.array([1] + [2] * (T - 1))[None], (B, T))
  zero_BP = jnp.zeros((B, P), jnp.int32)
  return attention.Blocks(
    block_BT, jnp.concatenate([zero_BP, block_BT], axis=1)
  )


def _suffix(config: Config, expert, state_BO, x_BZA, t_B):
  """Tokens of the expert, and the condition of its norms."""
  time_BD = flow_matching.time_embedding(t_B, config.expert.D)
  time_BD = time_BD.astype(x_BZA.dtype)
  action_BZD = _affine(expert, 'action_in_AD', x_BZA)
  if config.adaptive:
    time_BD = jax.nn.silu(_affine(expert, 'time_in_OD', time_BD))
    time_BD = jax.nn.silu(_affine(expert, 'time_out_FD', time_BD))
    return action_BZD, time_BD
  time_BZD = jnp.broadcast_to(time_BD[:, None], action_BZD.shape)
  mixed = jnp.concatenate([action_BZD, time_BZD], axis=-1)
  mixed = jax.nn.silu(_affine(expert, 'time_in_OD', mixed))
  action_BZD = _affine(expert, 'time_out_FD', mixed)
  state_BTD = _affine(expert, 'state_OD', state_BO)[:, None]
  tokens = jnp.concatenate([state_BTD, action_BZD], axis=1)
  return tokens, None


def _affine(params, name: str, x):
  """x W + b in the dtype of `x`; the sum is rounded once.

  The bias has the name of W with the letter of the outputs. Its gradient is a
  sum over tokens, so it is added in the type that it is stored in.
  """
  stem, letters = name.rsplit('_', 1)
  weight = params[name].astype(x.dtype)
  y = mixed_precision.product('...i,io->...o', x, weight)
  bias = params[f'{stem}_bias_{letters[1]}']
  return (y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)).astype(x.dtype)


def param_shapes(config: Config) -> dict[str, Any]:
  """Shapes of the parameters of all networks."""
  D, c = config.expert.D, config
  maps = {
    'action_in_AD': (c.A, D),
    'action_out_DA': (D, c.A),
    'time_in_OD': (D if c.adaptive else 2 * D, D),
    'time_out_FD': (D, D),
  }
  if not c.adaptive:
    maps['state_OD'] = c.O, D
  shapes = {}
  for name, shape in maps.items():
    shapes |= _affine_shapes(name, shape)
  if c.adaptive:
    for part in adaptive.PARTS:
      shapes |= _affine_shapes(f'norm_{part}_OD', (D, D))
  else:
    shapes['norm_D'] = (D,)
  dtype = config.expert.param_dtype
  expert = {
    name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()
  }
  maps = _affine_shapes('out_OD', (config.vision.D, config.trunk.D))
  projector = {
    name: jax.ShapeDtypeStruct(shape, config.trunk.param_dtype)
    for name, shape in maps.items()
  }
  return {
    'vision': vit.param_shapes(config.vision),
    'projector': projector,
    'trunk': transformer.param_shapes(config.trunk),
    'expert': expert | {'layers': stack.param_shapes(config.block)},
  }


def init_params(config: Config, key: jax.Array) -> dict[str, Any]:
  """Random parameters: normal matrices, biases and norms of zero effect."""
  shapes = param_shapes(config)
  vision_key, trunk_key, key = jax.random.split(key, 3)
  stddev = config.expert.init_stddev
  return {
    'vision': vit.init_params(config.vision, vision_key),
    'trunk': transformer.init_params(config.trunk, trunk_key),
  } | {
    # Scales are stored as their difference from one.
    name: initialize.draw(shapes[name], jax.random.fold_in(key, i), stddev, 0.0)
    for i, name in enumerate(('projector', 'expert'))
  }


def _affine_shapes(name: str, shape: tuple[int, int]) -> dict:
  stem, letters = name.rsplit('_', 1)
  return {name: shape, f'{stem}_bias_{letters[1]}': shape[1:]}
