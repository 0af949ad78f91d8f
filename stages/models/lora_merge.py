"""Adapters added to the weights of a model, one matrix after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stages import base
from stages.models import lora, quantization
from stages.models.files import lazy_array


def merge(params):
  """As `lora.merge`, of arrays that may be in files; nothing without adapters.

  Each matrix is computed when it is used, from its own arrays alone, and only
  the last one is kept.

  Args:
    params: those of a policy.
  """
  if not lora.is_adapted(params):
    return params
  parts = {p: _part(params, p) for p in lora.LETTERS.values()}
  parts = {p: part for p, part in parts.items() if _changes(part)}

  @lazy_array.keep_last
  def compute(p):
    arrays = jax.tree.map(jnp.asarray, parts[p])
    return np.asarray(_merge(arrays)['layers'][p])

  layers = {}
  for p, part in parts.items():
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), part
    )
    x = jax.eval_shape(_merge, shapes)['layers'][p]
    make = functools.partial(compute, p)
    layers[p] = lazy_array.LazyArray(x.shape, x.dtype, make)
  frozen = params[base.FROZEN]
  own = frozen[lora.PARAMS]
  scales = {quantization.scale_name(p) for p in parts}
  rest = {k: x for k, x in own['layers'].items() if k not in scales}
  frozen = frozen | {lora.PARAMS: own | {'layers': rest}}
  return lora.with_layers(params | {base.FROZEN: frozen}, layers)


_merge = jax.jit(lora.merge)


def _part(params, parameter: str):
  """Parameters of an adapted policy of which one matrix is left."""
  adapter, frozen = params[lora.ADAPTER]['layers'], params[base.FROZEN]
  layers = frozen[lora.PARAMS]['layers']
  names = parameter, quantization.scale_name(parameter)
  own = {k: layers[k] for k in names if k in layers}
  pair = {k: adapter[k] for k in lora.pair_names(parameter) if k in adapter}
  frozen = {lora.PARAMS: {'layers': own}, lora.ALPHA: frozen[lora.ALPHA]}
  return {lora.ADAPTER: {'layers': pair}, base.FROZEN: frozen}


def _changes(part) -> bool:
  """Whether the matrix has an adapter, or is quantized."""
  own = part[base.FROZEN][lora.PARAMS]['layers']
  return bool(part[lora.ADAPTER]['layers']) or len(own) > 1
