"""Small networks for vectors: an actor and a critic, two hidden layers each."""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp

LOG_STD_RANGE = -10.0, 2.0  # Of a state-dependent standard deviation.


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of both networks, in the letters of `stages/base.py`.

  Attributes:
    A: dimensions of an action, or its choices where it is discrete.
    D: width of the first hidden layer.
    F: width of the second.
    init_std: initial standard deviation of actions.
    state_dependent_std: whether it depends on the observation.
  """

  A: int
  D: int = 64
  F: int = 64
  init_std: float = 1.0
  state_dependent_std: bool = False


class Actor(nn.Module):
  """Mean and log standard deviation of a Gaussian over actions.

  The last layer starts small, so that initial means are near zero and initial
  standard deviations near `init_std`.
  """

  config: Config

  @nn.compact
  def __call__(self, obs):
    """`[…, O] -> mean […, A], log σ […, A]`; [A] if it is a parameter."""
    c = self.config
    hidden = _hidden(self, obs)
    mean = layer(self, hidden, 'out', 'FA', (c.F, c.A), 0.01)
    initial = nn.initializers.constant(jnp.log(c.init_std))
    if not c.state_dependent_std:
      return mean, self.param('log_std_A', initial, (c.A,))
    spread = layer(self, hidden, 'spread', 'FA', (c.F, c.A), 0.01)
    return mean, jnp.clip(jnp.log(c.init_std) + spread, *LOG_STD_RANGE)


class Logits(nn.Module):
  """Logits of choices, near zero at first: all are about equally likely."""

  config: Config

  @nn.compact
  def __call__(self, obs):
    """`[…, O] -> […, A]`, the choices of all dimensions one after another."""
    c = self.config
    return layer(self, _hidden(self, obs), 'out', 'FA', (c.F, c.A), 0.01)


class Critic(nn.Module):
  """Value of an observation, or one of each action of a chunk.

  Attributes:
    config: sizes of the hidden layers.
    Z: number of values; None for one, without a dimension.
  """

  config: Config
  Z: int | None = None

  @nn.compact
  def __call__(self, obs):
    """`[…, O] -> […]`, or `[…, Z]`."""
    if self.Z is not None:
      shape = self.config.F, self.Z
      return layer(self, _hidden(self, obs), 'out', 'FZ', shape, 1.0)

    def initial(key, shape):
      return nn.initializers.orthogonal(1.0)(key, (*shape, 1))[:, 0]

    weight_F = self.param('out_F', initial, (self.config.F,))
    bias = self.param('out_bias', nn.initializers.zeros, ())
    return _hidden(self, obs) @ weight_F + bias


def _hidden(module, x):
  """Two hidden layers: `[…, O] -> […, F]`."""
  c = module.config
  shape = x.shape[-1], c.D
  x = jnp.tanh(layer(module, x, 'enter', 'OD', shape, 2**0.5))
  return jnp.tanh(layer(module, x, 'up', 'DF', (c.D, c.F), 2**0.5))


def layer(module, x, name: str, letters: str, shape, scale: float):
  """An affine map whose weights are initialized orthogonally.

  Args:
    module: the Flax module that holds its parameters.
    x: `[…, shape[0]]`.
    name: of its parameters.
    letters: dimension letters of `shape`.
    shape: of the weights.
    scale: of the initial weights.
  """
  weight = module.param(
    f'{name}_{letters}', nn.initializers.orthogonal(scale), shape
  )
  bias = module.param(
    f'{name}_bias_{letters[1]}', nn.initializers.zeros, shape[1:]
  )
  # Equal ranks, as rank promotion is an error and `x` may have any rank.
  product = x @ weight
  return product + bias.reshape((1,) * (product.ndim - 1) + bias.shape)
