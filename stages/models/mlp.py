"""Small networks for vectors: an actor and a critic, two hidden layers each."""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
  """The shape of both networks, in the letters of `stages/base.py`.

  Attributes:
    O: features that are seen.
    A: dimensions of an action.
    D: width of the first hidden layer.
    F: width of the second.
    deviation: of actions at the beginning.
  """

  O: int
  A: int
  D: int = 64
  F: int = 64
  deviation: float = 1.0


class Actor(nn.Module):
  """The mean of a Gaussian over actions, and the log of its deviation.

  The deviation does not depend on what is seen. The last layer begins small, so
  that the first actions are about zero.
  """

  config: Config

  @nn.compact
  def __call__(self, obs):
    """`[…, O] -> mean […, A], log-deviation [A]`."""
    c = self.config
    mean = _layer(self, _hidden(self, obs), 'out', 'FA', (c.F, c.A), 0.01)
    initial = nn.initializers.constant(jnp.log(c.deviation))
    return mean, self.param('log_deviation_A', initial, (c.A,))


class Critic(nn.Module):
  """What is to be expected from here on."""

  config: Config

  @nn.compact
  def __call__(self, obs):
    """`[…, O] -> […]`."""

    def initial(key, shape):
      return nn.initializers.orthogonal(1.0)(key, (*shape, 1))[:, 0]

    weight_F = self.param('out_F', initial, (self.config.F,))
    bias = self.param('out_bias', nn.initializers.zeros, ())
    return _hidden(self, obs) @ weight_F + bias


def _hidden(module, x):
  """Two hidden layers."""
  c = module.config
  x = jnp.tanh(_layer(module, x, 'enter', 'OD', (c.O, c.D), 2**0.5))
  return jnp.tanh(_layer(module, x, 'up', 'DF', (c.D, c.F), 2**0.5))


def _layer(module, x, name: str, letters: str, shape, scale: float):
  """An affine map, with orthogonal weights to begin with."""
  weight = module.param(
    f'{name}_{letters}', nn.initializers.orthogonal(scale), shape
  )
  bias = module.param(
    f'{name}_bias_{letters[1]}', nn.initializers.zeros, shape[1:]
  )
  # Ranks are made equal: what is seen may have any number of rows and steps.
  product = x @ weight
  return product + bias.reshape((1,) * (product.ndim - 1) + bias.shape)
