"""OpenVLA-OFT, arXiv:2502.19645: OpenVLA that decodes a chunk in one pass.

The prompt is followed by one placeholder for each number of a chunk of actions,
a vector of zeros, and by the stop token. Attention is bidirectional everywhere,
so that one pass gives all numbers: tokens, each given the observation alone, or
real numbers by a head that was trained with an L1 loss. Pictures of several
cameras stand one after the other, and the robot's state may be a token after
their patches. The instruction may scale and shift what the towers compute, see
`film`.
"""

import dataclasses
import functools
import typing
from typing import Any, Literal, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from stages import base
from stages.models import block as block_lib
from stages.models import transformer
from stages.models.layers import initialize, mixed_precision, rounding
from stages.vla.openvla import film as film_lib
from stages.vla.openvla import openvla

Head = Literal['token', 'l1']
FILM = 'film'  # Key of its parameters.
NORM_EPSILON = 1e-5  # Of torch's LayerNorm.


@dataclasses.dataclass(frozen=True)
class Config:
  """The parts of a model.

  Attributes:
    openvla: towers, projector and language model.
    Z: actions of a chunk.
    A: numbers of an action.
    O: numbers of the robot's state; 0 where the model does not read it.
    cameras: number of pictures.
    head: 'token' for the output layer of the language model, 'l1' for real
      numbers.
    stop: the token after the placeholders.
    film: whether the instruction scales and shifts the towers' vectors.
  """

  openvla: openvla.Config
  Z: int = 8
  A: int = 7
  O: int = 0
  cameras: int = 1
  head: Head = 'token'
  stop: int = 2
  film: bool = False

  def __post_init__(self):
    if self.head not in typing.get_args(Head):
      raise ValueError(
        f'OpenVLA-OFT has no head {self.head!r}: give one of '
        f'{typing.get_args(Head)}.'
      )
    if min(self.Z, self.A, self.cameras) < 1 or self.O < 0:
      raise ValueError(
        f'A chunk of {self.Z} actions of {self.A} numbers from {self.cameras} '
        f'pictures and a state of {self.O} numbers cannot be decoded: give at '
        'least one action, number and picture, and no negative size.'
      )


class Observation(NamedTuple):
  """Pictures, an instruction and perhaps the state of a robot.

  Attributes:
    images: one picture a camera, the main one first, bytes of any size.
    prompt: tokens of the published prompt, padded on the right; the first one
      is the beginning of the text.
    state: normalized state; `()` where the model does not read it.
  """

  images: tuple[UInt8[Array, 'B rows columns colors'], ...]
  prompt: base.Prompt
  state: Float[Array, 'B O'] | tuple[()] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Dimensions of `StateProjector` and `L1Head`.

  Attributes:
    O: inputs.
    D: width of the language model.
    A: outputs of the head.
    dtype: type of the arithmetic.
    param_dtype: the type that parameters are stored in.
  """

  O: int
  D: int
  A: int
  dtype: str
  param_dtype: Any


def _affine(module, name: str, letters: str, x, *shape):
  weight = block_lib.matrix(module, f'{name}_{letters}', *shape)
  bias = block_lib.parameter(module, f'{name}_bias_{letters[1]}', shape[1])
  y = mixed_precision.product('bsi,io->bso', x, weight)
  return (y + bias[None, None]).astype(x.dtype)


def _norm(module, name: str, letter: str, x):
  width = x.shape[-1]
  scale = block_lib.parameter(module, f'{name}_{letter}', width)
  bias = block_lib.parameter(module, f'{name}_bias_{letter}', width)
  return mixed_precision.layer_norm(x, scale, bias, NORM_EPSILON)


class StateProjector(nn.Module):
  """Two linear maps with an exact GELU between them, [B, 1, O] to [B, 1, D]."""

  config: Sizes

  @nn.compact
  def __call__(self, x):
    c = self.config
    x = _affine(self, 'in', 'OF', x, c.O, c.D)
    x = mixed_precision.gelu(x)
    return _affine(self, 'out', 'FD', x, c.D, c.D)


class L1Head(nn.Module):
  """States of an action's numbers, side by side [B, Z, A D], to [B, Z, A].

  LayerNorm and a linear map with a ReLU, two such blocks with a residual, then
  LayerNorm and a linear map.
  """

  config: Sizes

  @nn.compact
  def __call__(self, x):
    c = self.config
    x = _norm(self, 'in_norm', 'O', x)
    x = nn.relu(_affine(self, 'in', 'OD', x, c.O, c.D))
    for i in range(2):
      y = _norm(self, f'block{i}_norm', 'D', x)
      x = x + nn.relu(_affine(self, f'block{i}', 'DF', y, c.D, c.D))
    x = _norm(self, 'out_norm', 'D', x)
    return _affine(self, 'out', 'DA', x, c.D, c.A)


def heads(config: Config) -> dict[str, nn.Module]:
  """The parts that OpenVLA does not have, by name."""
  c, found = config.openvla.llama, {}
  make = functools.partial(
    Sizes, D=c.D, A=config.A, dtype=c.dtype, param_dtype=c.param_dtype
  )
  if config.O:
    found['state_projector'] = StateProjector(make(O=config.O))
  if config.head == 'l1':
    found['l1_head'] = L1Head(make(O=config.A * c.D))
  return found


def param_shapes(config: Config) -> Any:
  """Shapes and types of the parameters, by part."""
  shapes = openvla.param_shapes(config.openvla)
  for name, module in heads(config).items():
    x = jnp.zeros((1, 1, module.config.O), module.config.dtype)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    shapes[name] = variables['params']
  if config.film:
    shapes[FILM] = film_lib.param_shapes(config.openvla)
  return shapes


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: Config, key: jax.Array) -> Any:
  """Random parameters, by part."""
  params = openvla.init_params(config.openvla, key)
  shapes = param_shapes(config)
  own = {name: shapes[name] for name in heads(config)}
  if own:
    key = jax.random.fold_in(key, 1)
    params |= initialize.draw(own, key, config.openvla.llama.init_stddev)
  if config.film:
    params[FILM] = film_lib.init_params(config.openvla)
  return params


def compute_params(config: Config, params: Any) -> Any:
  """Parameters rounded once, as by `openvla`; those of heads and FiLM, too."""
  names = {*heads(config), FILM}.intersection(params)
  dtype = config.openvla.llama.dtype
  return openvla.compute_params(config.openvla, params) | {
    name: rounding.round_matrices(params[name], dtype) for name in names
  }


def check(config: Config, obs: Observation):
  """Refuses observations that the model cannot read.

  Raises:
    ValueError: for another number of pictures, or another state.
  """
  if len(obs.images) != config.cameras:
    raise ValueError(
      f'The model reads {config.cameras} pictures, and {len(obs.images)} are '
      'given: give one a camera, the main one first.'
    )
  got = obs.state.shape[-1] if len(obs.state) else 0
  if got != config.O:
    raise ValueError(
      f'The model reads a state of {config.O} numbers, and {got} are given: '
      'give what it was trained with, or set O of its config.'
    )


def action_states(config: Config, params, obs: Observation):
  """States [B, Z A, D] that predict a chunk's numbers, before the last norm.

  Each is the state before its placeholder, as in training with causal shifts:
  the first is that of the last token of the prompt.
  """
  check(config, obs)
  model = transformer.Transformer(config.openvla.llama)
  stop_B1 = jnp.full(obs.prompt.token[:, :1].shape, config.stop, jnp.int32)
  llama_params = {'params': params['llama']}
  stop_B1D = model.apply(llama_params, stop_B1, method='embed')
  x_BPD, mask_BP = _prompt(config, params, obs, stop_B1D)
  B, P, D = x_BPD.shape
  T = config.Z * config.A
  empty_BTD = jnp.zeros((B, T, D), x_BPD.dtype)
  x_BSD = jnp.concatenate([x_BPD, empty_BTD, stop_B1D], 1)
  end = jnp.ones((B, T + 1), mask_BP.dtype)
  mask_BS = jnp.concatenate([mask_BP, end], 1)
  x_BSD, _ = model.apply(
    llama_params,
    x_BSD,
    mask_BS,
    bidirectional=True,
    method='embedded_states',
  )
  last_B1D = openvla.last_states(x_BSD[:, :P], mask_BP)
  return jnp.concatenate([last_B1D, x_BSD[:, P : P + T - 1]], 1)


def _prompt(config: Config, params, obs: Observation, stop_B1D):
  """Vectors and mask of pictures, state and instruction."""
  c = config.openvla
  x = transformer.Transformer(c.llama).apply(
    {'params': params['llama']}, obs.prompt.token, method='embed'
  )
  films = {}
  if config.film:
    mean = film_lib.mean_embedding(x, obs.prompt.mask, stop_B1D)
    films = film_lib.films(c, params[FILM], mean)
  seen = [openvla.embed_patches(c, params, y, films) for y in obs.images]
  if config.O:
    state_B1O = obs.state[:, None].astype(c.llama.dtype)
    projector = heads(config)['state_projector']
    variables = {'params': params['state_projector']}
    seen.append(projector.apply(variables, state_B1O))
  seen = jnp.concatenate(seen, 1)
  mask = jnp.ones(seen.shape[:2], obs.prompt.mask.dtype)
  return (
    openvla.insert_patches(x, seen),
    openvla.insert_patches(obs.prompt.mask, mask),
  )


def regress(config: Config, params, x_BTD):
  """Normalized actions [B, Z A] of the L1 head, from `action_states`."""
  c = config.openvla.llama
  x_BTD = block_lib.rms_norm(c, x_BTD, params['llama']['norm_D'])
  x = x_BTD.reshape(x_BTD.shape[0], config.Z, -1)
  variables = {'params': params['l1_head']}
  action = heads(config)['l1_head'].apply(variables, x)
  wide = mixed_precision.wide_dtype(action.dtype)
  return action.astype(wide).reshape(action.shape[0], -1)
