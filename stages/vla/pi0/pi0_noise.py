"""The network of Flow-Noise's standard deviations, for π0 and π0.5."""

from flax import linen as nn
import jax.numpy as jnp

from stages.models.control import mlp

SPREAD = 'spread'  # Of its parameters.
WIDTHS = 128, 64


class Spread(nn.Module):
  """Outputs from which standard deviations follow, for each number of a chunk.

  It has two hidden layers, as RLinf's ExploreNoiseNet, and reads the last
  states of the expert. Its last layer starts small, so that all standard
  deviations start in the middle of their range.

  Attributes:
    A: numbers of an action.
  """

  A: int

  @nn.compact
  def __call__(self, y_BZD):
    """`[B, Z, D] -> [B, Z, A]`."""
    D, (wide, narrow) = y_BZD.shape[-1], WIDTHS
    root = 2**0.5
    x = jnp.tanh(mlp.layer(self, y_BZD, 'enter', 'OD', (D, wide), root))
    x = jnp.tanh(mlp.layer(self, x, 'up', 'DF', (wide, narrow), root))
    return mlp.layer(self, x, 'out', 'FA', (narrow, self.A), 0.01)

  def init_params(self, D: int, key):
    """Random parameters, for an expert of width D."""
    return self.init(key, jnp.zeros((1, 1, D)))['params']
