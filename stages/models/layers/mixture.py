"""Mixture of experts: a feed-forward of which each token uses a part.

No token is dropped and no expert is padded: tokens are sorted by expert, and
each expert multiplies its own, however many they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stages.models.layers import mixed_precision

# Collection of flax in which layers leave their routing where it is mutable.
ROUTING = 'routing'
# Collection from which they take the experts of each token, where it is given.
REPLAYED = 'replayed'


class Routing(NamedTuple):
  """The result of the router of a layer.

  Attributes:
    prob: the probability of each expert.
    expert: indices of the experts that a token uses.
  """

  prob: Float[Array, '*L B T E']
  expert: Int[Array, '*L B T top_k']


def route(logit_BTE, top_k: int, normalize: bool, expert=None):
  """The `top_k` experts of each token, and their weights, in float32.

  Args:
    logit_BTE: logits of the router.
    top_k: experts of a token.
    normalize: whether the weights of a token add up to one; they are the
      probabilities among all experts otherwise.
    expert: indices of the experts to use, [B, T, top_k]; None for the likeliest
      ones.

  Returns:
    Weights [B, T, top_k], and the routing.
  """
  prob_BTE = jax.nn.softmax(logit_BTE, axis=-1)
  if expert is None:
    weight, expert = jax.lax.top_k(prob_BTE, top_k)
  else:
    weight = jnp.take_along_axis(prob_BTE, expert, axis=-1)
    # Padding may have experts without any probability, and 0 / 0 is NaN.
    weight = jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)
  if normalize:
    weight /= weight.sum(-1, keepdims=True)
  return weight, Routing(prob_BTE, expert)


def router_logits(x_BTD, router_DE):
  """Logits of the router, in float32 or wider.

  Rounded logits would send tokens to other experts.
  """
  wide = mixed_precision.wide_dtype(x_BTD.dtype)
  return jnp.einsum('BTD,DE->BTE', x_BTD.astype(wide), router_DE.astype(wide))


def feedforward(x_BTD, weight, expert, experts, activation):
  """Σₖ weightₖ · down(activation(gate x) · up x), over the experts of a token.

  Args:
    x_BTD: activations.
    weight: weights of the experts of each token, [B, T, top_k].
    expert: their indices.
    experts: the matrices of gate [E, D, F], up [E, D, F] and down [E, F, D].
    activation: of the gates.
  """
  gate_EDF, up_EDF, down_EFD = experts
  B, T, D = x_BTD.shape
  top_k, num_experts = expert.shape[-1], gate_EDF.shape[0]
  expert = expert.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
  rows = x_BTD.reshape(-1, D)[order // top_k]
  gate = jax.lax.ragged_dot(rows, gate_EDF, sizes)
  up = jax.lax.ragged_dot(rows, up_EDF, sizes)
  out = jax.lax.ragged_dot(activation(gate) * up, down_EFD, sizes)
  out = out[jnp.argsort(order)].reshape(B, T, top_k, D)
  # Weights are float32, and so is the sum.
  return (out * weight[..., None]).sum(2).astype(x_BTD.dtype)
