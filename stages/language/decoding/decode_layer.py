"""Parts of a layer as decoding calls them, traced once for all layers.

Decoding unrolls the layers, so that each has a cache of its own. Tracing them
one by one would take most of the time in which a step of a deep model starts.
"""

import functools

import jax

from stages.models import transformer
from stages.models.layers import block

# For functions whose first argument is the model's config. They are inlined, so
# the program is that of calling them for each layer.
traced_once = functools.partial(jax.jit, static_argnums=0, inline=True)


@traced_once
def project(config: transformer.Config, layer, x_BTD, cos_BTR, sin_BTR):
  """`block.Block.project` with the parameters of a layer."""
  return block.Block(config).apply(
    {'params': layer}, x_BTD, cos_BTR, sin_BTR, method='project'
  )


@traced_once
def finish(config: transformer.Config, layer, x_BTD, seen_BTHW):
  """`block.Block.finish` with the parameters of a layer."""
  return block.Block(config).apply(
    {'params': layer}, x_BTD, seen_BTHW, method='finish'
  )
