"""Stacks of equal layers, which are compiled once.

Of two models that share attention, such as π0's, the first does not attend to
the second. So its keys and values are computed once, however often the second
one runs, see `run`. Both have equally many layers and equal heads; their widths
may differ.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from stages import remat as remat_lib
from stages.models import block as block_lib
from stages.models.layers import attention, mixture
from stages.models.layers import rope as rope_lib


def layers(block: type[nn.Module], config: Any, in_axes: Any) -> nn.Module:
  """A module of `config.L` layers, whose parameters are stacked.

  Args:
    block: the class of one layer, made of `config`.
    config: sizes, and which activations are computed again.
    in_axes: of a layer's arguments after the activations, as in `nn.scan`.
  """
  if policy := remat_lib.policy(config.remat):
    block = nn.remat(block, policy=policy, prevent_cse=False)
  return nn.scan(
    block,
    variable_axes={'params': 0, mixture.ROUTING: 0, mixture.REPLAYED: 0},
    split_rngs={'params': True},
    in_axes=in_axes,
    length=config.L,
    # A layer would be traced once more, to find constants that it has none of.
    check_constancy_invariants=False,
  )(config)


def run(
  block: block_lib.Block,
  layers: Any,
  x_BTD,
  position_BT,
  mask: attention.Mask,
  *,
  prefix: attention.PromptCache | None = None,
  condition=None,
):
  """Activations after all layers, and the keys and values of each.

  Args:
    block: one layer.
    layers: parameters of the layers, stacked.
    x_BTD: activations before the first layer.
    position_BT: their positions.
    mask: where they attend: to the keys of `prefix`, then to their own.
    prefix: keys and values of the first model, of [L, B, P, K, W]; None for
      none.
    condition: what adaptive norms read, a vector of each row.
  """
  c = block.config
  cos_BTR, sin_BTR = rope_lib.angles(c.rope, c.W, position_BT)

  def layer(x_BTD, scanned):
    params, cached = scanned
    variables = {'params': params}
    q_BTHW, k_BTKW, v_BTKW = block.apply(
      variables, x_BTD, cos_BTR, sin_BTR, condition, method='project'
    )
    k_BCKW, v_BCKW = k_BTKW, v_BTKW
    if cached is not None:
      k_BCKW, v_BCKW = (
        jnp.concatenate([past, own], axis=1)
        for past, own in zip(cached, (k_BTKW, v_BTKW), strict=True)
      )
    seen_BTHW = attention.attention(
      q_BTHW,
      k_BCKW,
      v_BCKW,
      mask,
      scale=c.query_scale,
      softcap=c.score_softcap,
      implementation=c.attention,
      max_live_scores=c.max_live_scores,
    )
    x_BTD = block.apply(variables, x_BTD, seen_BTHW, condition, method='finish')
    return x_BTD, attention.PromptCache(k_BTKW, v_BTKW)

  if policy := remat_lib.policy(c.remat):
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
  return jax.lax.scan(layer, x_BTD, (layers, prefix))


def param_shapes(block: block_lib.Block) -> Any:
  """Shapes of the parameters of all layers, stacked."""
  c = block.config
  x_BTD = jnp.zeros((1, 1, c.D), c.dtype)
  angle_BTR = jnp.zeros((1, 1, c.W // 2))
  one = jax.eval_shape(
    lambda: block.init(
      jax.random.key(0),
      x_BTD,
      angle_BTR,
      angle_BTR,
      x_BTD[:, 0],
      method='project',
    )
  )['params']
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((c.L, *x.shape), x.dtype), one
  )
