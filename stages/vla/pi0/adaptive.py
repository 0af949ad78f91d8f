"""A layer whose norms depend on a condition, such as the time of a denoising.

Adaptive RMSNorm, as in π0.5 (arXiv:2504.16054): a condition c, a vector of each
row, gives scale, shift and gate by affine maps.

  norm(x) = x / √(mean x² + ε) · (1 + scale(c)) + shift(c)
  x′ = x + gate(c) · f(norm(x))
"""

import jax.numpy as jnp

from stages.models import block as block_lib
from stages.models.layers import mixed_precision

PARTS = 'scale', 'shift', 'gate'  # In the order of checkpoints.
NORMS = 'before_attention', 'before_feedforward'  # Of a layer.
# Matrices of a layer's norms, which are products with the condition.
MATRICES = tuple(f'{norm}_{part}_OD' for norm in NORMS for part in PARTS)


def declare(module, name: str, width: int, D: int) -> dict:
  """Makes the parameters of a norm: of each part, a matrix and a bias.

  Args:
    module: the flax module that holds them.
    name: of the norm.
    width: features of the condition, the letter O.
    D: width of what is normalized.
  """
  parameters = {}
  for part in PARTS:
    matrix, bias = f'{name}_{part}_OD', f'{name}_{part}_bias_D'
    parameters[matrix] = block_lib.parameter(module, matrix, width, D)
    parameters[bias] = block_lib.parameter(module, bias, D)
  return parameters


def modulation(parameters: dict, name: str, part: str, condition_BO):
  """Scale, shift or gate of each row, [B, 1, D], in float32 or wider."""
  wide = mixed_precision.wide_dtype(condition_BO.dtype)
  y_BD = mixed_precision.product(
    'BO,OD->BD', condition_BO, parameters[f'{name}_{part}_OD']
  ).astype(wide)
  return (y_BD + parameters[f'{name}_{part}_bias_D'][None])[:, None]


def norm(parameters: dict, name: str, x_BTD, condition_BO, norm_epsilon: float):
  """The adaptive norm `name` of `x_BTD`."""
  scale, shift = (
    modulation(parameters, name, part, condition_BO) for part in PARTS[:2]
  )
  wide_x = x_BTD.astype(scale.dtype)
  mean = jnp.mean(wide_x * wide_x, -1, keepdims=True)
  normal = wide_x / jnp.sqrt(mean + norm_epsilon)
  return (normal * (1.0 + scale) + shift).astype(x_BTD.dtype)


class Block(block_lib.Block):
  """A transformer layer whose two norms are adaptive.

  The condition has the width of the model.
  """

  def declare_norms(self):
    """Makes the parameters of the norms before attention and feed-forward."""
    D = self.config.D
    self.norms = {name: declare(self, name, D, D) for name in NORMS}

  def normalize(self, name: str, x_BTD, condition):
    """The norm `name`, by a condition [B, D]."""
    return norm(
      self.norms[name], name, x_BTD, condition, self.config.norm_epsilon
    )

  def add(self, name: str, x_BTD, y_BTD, condition):
    """Adds the gated output `y_BTD`."""
    gate = modulation(self.norms[name], name, 'gate', condition)
    y_BTD = y_BTD.astype(gate.dtype) * gate
    return (x_BTD.astype(gate.dtype) + y_BTD).astype(x_BTD.dtype)
