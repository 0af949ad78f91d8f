"""Parts of a layer as decoding calls them, traced once for all layers.

Decoding unrolls the layers, so that each has a cache of its own. Tracing them
one by one would take most of the time in which a step of a deep model starts.
"""

import functools

import jax

from sharding import mesh as mesh_lib
from stages.models import block, transformer
from stages.models.layers import mixture

# For functions whose first argument is the model's config. They are inlined, so
# the program is that of calling them for each layer.
traced_once = functools.partial(mesh_lib.jitted, static_argnums=0, inline=True)


@traced_once
def project(config: transformer.Config, layer, x_BTD, cos_BTR, sin_BTR):
  """`block.Block.project` with the parameters of a layer."""
  return block.Block(config).apply(
    {'params': layer}, x_BTD, cos_BTR, sin_BTR, method='project'
  )


def finish(
  config: transformer.Config, layer, x_BTD, seen_BTHW, record=None
) -> jax.Array:
  """`block.Block.finish` with the parameters of a layer.

  Args:
    config: the model.
    layer: the parameters.
    x_BTD: activations before the layer.
    seen_BTHW: output of attention.
    record: list to which the experts of each token, [B, T, k], are added; None
      to add none.
  """
  if record is None:
    return _finish(config, layer, x_BTD, seen_BTHW)
  x_BTD, expert = _finish_and_record(config, layer, x_BTD, seen_BTHW)
  record.append(expert)
  return x_BTD


@traced_once
def _finish(config: transformer.Config, layer, x_BTD, seen_BTHW):
  return block.Block(config).apply(
    {'params': layer}, x_BTD, seen_BTHW, method='finish'
  )


@traced_once
def _finish_and_record(config: transformer.Config, layer, x_BTD, seen_BTHW):
  x_BTD, left = block.Block(config).apply(
    {'params': layer},
    x_BTD,
    seen_BTHW,
    method='finish',
    mutable=[mixture.ROUTING],
  )
  return x_BTD, left[mixture.ROUTING][mixture.ROUTING].expert
