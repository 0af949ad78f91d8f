"""What actions are worth: several networks of one shape, told apart by luck."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import base


class Critic(NamedTuple):
  """Estimates of what is to be expected once something is done.

  Attributes:
    init: `key -> params`.
    value: `params, obs [B, O], command [B, …] -> value_IB`, one a critic.
  """

  init: Callable[[base.Key], base.Params]
  value: Callable[[base.Params, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
  """The shape of all of them, in the letters of `stages/base.py`.

  Attributes:
    I: how many.
    O: features that are seen.
    A: dimensions of an action.
    D: width of the first hidden layer.
    F: width of the second.
    norm: whether what a hidden layer adds up is brought to mean zero and
      variance one, which bounds what is expected of actions that nobody took.
  """

  I: int
  O: int
  A: int
  D: int = 256
  F: int = 256
  norm: bool = False


def ensemble(
  world: base.Env,
  *,
  num_critics: int = 2,
  width: int = 256,
  layer_norm: bool = False,
  chunk: int = 1,
) -> Critic:
  """Critics for what a world shows and takes.

  Args:
    world: whose observations are vectors.
    num_critics: how many: 2 are SAC's, 10 RLPD's.
    width: of the hidden layers.
    layer_norm: layer normalization, as RLPD has it.
    chunk: commands that are given at a time.
  """
  if isinstance(world.obs_spec, dict) or len(world.obs_spec.shape) != 1:
    raise ValueError(
      'These critics read vectors, and this environment has '
      f'{world.obs_spec}: configure it to return its state as a vector, or '
      'learn from images by PPO.'
    )
  low, high = (
    jnp.asarray(x * chunk, float) for x in (world.action_low, world.action_high)
  )
  module = Ensemble(
    Config(
      num_critics,
      world.obs_spec.shape[0],
      low.shape[0],
      width,
      width,
      layer_norm,
    )
  )

  def init(key):
    obs = jnp.zeros((1, *world.obs_spec.shape), float)
    return module.init(key, obs, jnp.zeros((1, *low.shape), float))['params']

  def value(params, obs_BO, command):
    command_BA = command.reshape(obs_BO.shape[0], -1)
    inside_BA = (2.0 * command_BA - (low + high)[None]) / (high - low)[None]
    return module.apply({'params': params}, obs_BO, inside_BA)

  return Critic(init, value)


class Ensemble(nn.Module):
  """Two hidden layers each; a parameter's first dimension is the critic."""

  config: Config

  @nn.compact
  def __call__(self, obs_BO, action_BA):
    """`[B, O], [B, A] in −1 … 1 -> [I, B]`."""
    c = self.config
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    first, up, out = map(_uniform, (c.O + c.A, c.D, c.F))
    weights = {
      'see': self.param('see_IOD', first, (c.I, c.O, c.D)),
      'do': self.param('do_IAD', first, (c.I, c.A, c.D)),
      'enter': self.param('enter_bias_ID', zeros, (c.I, c.D)),
      'up': self.param('up_IDF', up, (c.I, c.D, c.F)),
      'up_bias': self.param('up_bias_IF', zeros, (c.I, c.F)),
      'out': self.param('out_IF', out, (c.I, c.F)),
      'out_bias': self.param('out_bias_I', zeros, (c.I,)),
    }
    if c.norm:
      weights |= {
        'enter_scale': self.param('enter_scale_ID', ones, (c.I, c.D)),
        'enter_shift': self.param('enter_shift_ID', zeros, (c.I, c.D)),
        'up_scale': self.param('up_scale_IF', ones, (c.I, c.F)),
        'up_shift': self.param('up_shift_IF', zeros, (c.I, c.F)),
      }
    one = functools.partial(_value, c.norm)
    return jax.vmap(one, (0, None, None))(weights, obs_BO, action_BA)


def _value(norm: bool, weights, obs, action):
  """One critic."""
  w = weights
  x = obs @ w['see'] + action @ w['do'] + w['enter'][None]
  if norm:
    x = _normed(x, w['enter_scale'], w['enter_shift'])
  x = jax.nn.relu(x) @ w['up'] + w['up_bias'][None]
  if norm:
    x = _normed(x, w['up_scale'], w['up_shift'])
  return jax.nn.relu(x) @ w['out'] + w['out_bias']


def _normed(x, scale, shift):
  """Layer normalization, arXiv:1607.06450."""
  x = jax.nn.standardize(x, axis=-1, epsilon=1e-6)
  return x * scale[None] + shift[None]


def _uniform(fan: int):
  """Weights within ±1/√fan, of which as many are added up."""
  return lambda key, shape: (
    fan**-0.5 * jax.random.uniform(key, shape, minval=-1.0)
  )
