"""The critic of π0 and π0.5."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stages import base
from stages.models.control import mlp
from stages.vla.pi0 import pi0


class Critic(NamedTuple):
  """A small network of the state and of the trunk's activations.

  Attributes:
    width: of its hidden layers.
    tokens: whose activations it reads; 1 for their mean.
    config: sizes of the model.
    Z: number of values, as of `mlp.Critic`.
  """

  width: int
  tokens: int
  config: pi0.Config
  Z: int | None = None

  def init(self, key):
    """Random parameters."""
    return self._network().init(key, jnp.zeros(self._features()))['params']

  def value(self, params, context):
    """Values of rows, in the leading dimensions of the state, and [Z]."""
    prefix, state = context
    weight = prefix.mask[:, :, None].astype(state.dtype)
    output = jax.lax.stop_gradient(prefix.output).astype(state.dtype) * weight
    if self.tokens == 1:
      output = output.sum(1) / weight.sum(1)
    seen = output.reshape(*state.shape[:-1], -1)
    variables = {'params': params[base.CRITIC]}
    features = jnp.concatenate([seen, state], axis=-1)
    return self._network().apply(variables, features)

  def _features(self) -> int:
    return self.tokens * self.config.trunk.D + self.config.O

  def _network(self) -> mlp.Critic:
    sizes = mlp.Config(self._features(), self.config.A, self.width, self.width)
    return mlp.Critic(sizes, self.Z)
