"""FiLM of OpenVLA-OFT ("OFT+"): the instruction modulates the vision towers.

The mean ē of the embeddings of an instruction is projected to a scale and a
shift for each layer of each tower (arXiv:2502.19645, arXiv:1709.07871):

  γₗ = Wₗ ē + wₗ        βₗ = Uₗ ē + uₗ        x ← (1 + γₗ) x + βₗ

between attention and feed-forward. All pictures of a row have the same ones.
"""

from typing import Any

import jax
import jax.numpy as jnp

from stages.models.layers import mixed_precision
from stages.models.vision import vit
from stages.vla.openvla import openvla

TOWERS = 'dino', 'siglip'
LAYERS = 'layers'  # Names that `sharding.rules` knows as a stack of layers.


def param_shapes(config: openvla.Config) -> Any:
  """Shapes and types of the parameters, by tower; O is the width of ē."""
  found = {}
  for name in TOWERS:
    tower = vit.inner(getattr(config, name))
    matrix = tower.L, config.llama.D, tower.D
    shapes = {}
    for kind in 'scale', 'shift':
      shapes[f'{kind}_OD'] = matrix
      shapes[f'{kind}_bias_D'] = tower.L, tower.D
    found[name] = {
      LAYERS: {
        key: jax.ShapeDtypeStruct(shape, tower.param_dtype)
        for key, shape in shapes.items()
      }
    }
  return found


def init_params(config: openvla.Config) -> Any:
  """Parameters of zero, with which the towers see what they saw before.

  Published fine-tuning draws them from torch's distribution of linear maps,
  which is close to zero.
  """
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), param_shapes(config)
  )


def mean_embedding(x_BPD, mask_BP, end_B1D):
  """ē: the mean of the embeddings of a prompt and of what ends the chunk.

  Published code averages all tokens but the placeholders of actions, so the
  stop token counts. It also averages the padding of a batch of prompts in
  training, but has none while acting; here padding never counts.

  Returns:
    [B, D], in float32 or wider.
  """
  wide = mixed_precision.wide_dtype(x_BPD.dtype)
  is_token_BP1 = (mask_BP > 0)[:, :, None]
  x_BPD = jnp.where(is_token_BP1, x_BPD.astype(wide), 0.0)
  sum_BD = x_BPD.sum(1) + end_B1D[:, 0].astype(wide)
  return sum_BD / (1 + is_token_BP1.sum(1))


def films(config: openvla.Config, params, mean_BO) -> dict[str, vit.Film]:
  """Scales and shifts of each tower's layers from `mean_embedding`."""
  dtype = jnp.dtype(config.llama.dtype)
  x_BO = mean_BO.astype(dtype)
  found = {}
  for name in TOWERS:
    own = params[name][LAYERS]
    parts = (
      mixed_precision.product('BO,LOD->LBD', x_BO, own[f'{kind}_OD'])
      + own[f'{kind}_bias_D'][:, None]
      for kind in ('scale', 'shift')
    )
    found[name] = vit.Film(*parts)
  return found
