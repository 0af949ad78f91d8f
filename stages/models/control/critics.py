"""Q-functions: an ensemble of critics, told apart by their initial weights."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import base, ranges
from stages.envs import action_range
from stages.envs import env as env_lib


class Critic(NamedTuple):
  """Estimates of the return after an action.

  Attributes:
    init: `key -> params`.
    value: `params, obs [B, O], env_action [B, …] -> value_IB`: one estimate of
      each critic.
  """

  init: Callable[[base.Key], base.Params]
  value: Callable[[base.Params, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the ensemble, in the letters of `stages/base.py`.

  Attributes:
    I: number of critics.
    O: features of an observation.
    A: dimensions of an action.
    D: width of the first hidden layer.
    F: width of the second.
    norm: whether hidden layers have layer normalization, which bounds the
      estimates of actions that no data covers.
  """

  I: int
  O: int
  A: int
  D: int = 256
  F: int = 256
  norm: bool = False


def ensemble(
  env: env_lib.Env,
  *,
  num_critics: ranges.PositiveInt = 2,
  width: ranges.PositiveInt = 256,
  layer_norm: bool = False,
  chunk: ranges.PositiveInt = 1,
) -> Critic:
  """Makes critics for an environment's spaces.

  Args:
    env: its observations are vectors.
    num_critics: 2 for SAC, 10 for RLPD.
    width: of both hidden layers.
    layer_norm: whether hidden layers are normalized, as in RLPD.
    chunk: actions that are given at a time.

  Raises:
    ValueError: if observations are not vectors, or actions are discrete.
  """
  low, high = action_range.bounds(env, chunk)
  if isinstance(env.obs_spec, dict) or len(env.obs_spec.shape) != 1:
    raise ValueError(
      'These critics read vectors, and this environment has '
      f'{env.obs_spec}: configure it to return its state as a vector, or '
      'learn from images by PPO.'
    )
  module = Ensemble(
    Config(
      num_critics,
      env.obs_spec.shape[0],
      low.shape[0],
      width,
      width,
      layer_norm,
    )
  )

  def init(key):
    obs = jnp.zeros((1, *env.obs_spec.shape), float)
    return module.init(key, obs, jnp.zeros((1, *low.shape), float))['params']

  def value(params, obs_BO, env_action):
    action_BA = env_action.reshape(obs_BO.shape[0], -1)
    inside_BA = (2.0 * action_BA - (low + high)[None]) / (high - low)[None]
    return module.apply({'params': params}, obs_BO, inside_BA)

  return Critic(init, value)


class Ensemble(nn.Module):
  """Critics of two hidden layers; parameters have the critic first."""

  config: Config

  @nn.compact
  def __call__(self, obs_BO, action_BA):
    """`[B, O], [B, A] in −1 … 1 -> [I, B]`."""
    c = self.config
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    first, up, out = map(_uniform, (c.O + c.A, c.D, c.F))
    weights = {
      'obs': self.param('see_IOD', first, (c.I, c.O, c.D)),
      'action': self.param('do_IAD', first, (c.I, c.A, c.D)),
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
    value = functools.partial(_value, c.norm)
    return jax.vmap(value, (0, None, None))(weights, obs_BO, action_BA)


def _value(norm: bool, weights, obs, action):
  """The value of one critic, [B]."""
  w = weights
  x = obs @ w['obs'] + action @ w['action'] + w['enter'][None]
  if norm:
    x = _layer_norm(x, w['enter_scale'], w['enter_shift'])
  x = jax.nn.relu(x) @ w['up'] + w['up_bias'][None]
  if norm:
    x = _layer_norm(x, w['up_scale'], w['up_shift'])
  return jax.nn.relu(x) @ w['out'] + w['out_bias']


def _layer_norm(x, scale, shift):
  """Layer normalization, arXiv:1607.06450."""
  x = jax.nn.standardize(x, axis=-1, epsilon=1e-6)
  return x * scale[None] + shift[None]


def _uniform(fan: int):
  """An initializer, uniform within ±1/√fan; `fan` is the number of inputs."""
  return lambda key, shape: (
    fan**-0.5 * jax.random.uniform(key, shape, minval=-1.0)
  )
