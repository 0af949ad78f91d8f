"""Adapters in the language model of a vision-language-action policy.

Parameters of such a policy have the form of those of `lora`. The parts of the
model that are not trained are under `base.FROZEN`: towers, projector and
language model, in the types to which the model rounds them
(`base.Policy.round_params`). The adapters are trained. So are all other parts,
in full: a critic, the heads of OpenVLA-OFT, the expert of π0.

For sampling and scoring, these other parts are rounded as without adapters.
Adapters stay in float32, as in `lora`.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from stages import base
from stages.models import adapters, lora, lora_merge


def wrap(
  policy: base.Policy,
  settings: lora.Lora,
  frozen_parts: tuple[str, ...],
  part: str,
  prefix: str | None = None,
) -> base.Policy:
  """A policy with some parts frozen, one of which gets trained adapters.

  Args:
    policy: a policy whose parameters are a dict of the parts of its model.
    settings: rank, alpha and targets.
    frozen_parts: names of the parts that are frozen.
    part: name of the frozen part that gets adapters, the language model.
    prefix: prefix of the names of that part's tensors in adapter files; None
      if adapters of this model cannot be read from files.

  Raises:
    CheckpointError: if `settings.adapter` does not fit the model.
    ValueError: if `settings.adapter` is given although `prefix` is None, or if
      weights are to be quantized, which is not supported.
  """
  if settings.adapter and prefix is None:
    raise ValueError(
      'Adapters of this model start anew: leave out `adapter`, or add it to '
      'the weights of the checkpoint first.'
    )
  if settings.quantize:
    raise ValueError(
      f'quantize is {settings.quantize!r}, and the weights of VLAs cannot be '
      'quantized: leave it out.'
    )

  start = None
  if settings.adapter:
    shapes = jax.eval_shape(policy.init, jax.random.key(0))[part]
    settings, start = adapters.load(settings, shapes, prefix=prefix)

  def init(key):
    params = dict(policy.init(key))
    # The model rounds these weights anyway, and no update is added to them.
    frozen = policy.round_params({k: params.pop(k) for k in frozen_parts})
    if start:
      adapter = start(frozen[part])
    else:
      adapter = lora.init(frozen[part], settings, jax.random.fold_in(key, 2))
    alpha = lora.DEFAULT_ALPHA if settings.alpha is None else settings.alpha
    own = {lora.PARAMS: frozen, lora.ALPHA: jnp.float32(alpha)}
    return {lora.ADAPTER: adapter, base.FROZEN: own} | params

  joined = functools.partial(_whole, lora.join, part=part)

  def merged(params):
    return merge(params, part=part) if lora.is_adapted(params) else params

  return policy._replace(
    init=init,
    act=lora.prepared(policy.act, merged),
    evaluate=lora.prepared(policy.evaluate, joined),
    value=lora.prepared(policy.value, joined),
    imitation_loss=lora.prepared(policy.imitation_loss, joined),
    prepare_act=merged,
  )


def of_part(params, *, part: str):
  """Parameters of the part with adapters alone, in the form of `lora`'s."""
  frozen = params[base.FROZEN]
  own = {
    lora.PARAMS: frozen[lora.PARAMS][part],
    lora.ALPHA: frozen[lora.ALPHA],
  }
  return {lora.ADAPTER: params[lora.ADAPTER], base.FROZEN: own}


def merge(params, *, part: str):
  """Parameters of the model by part, with adapters added to the weights."""
  return _whole(lora.merge, params, part=part)


def merge_if_adapted(params, *, part: str):
  """Returns `merge` of `params`, or `params` themselves without adapters.

  The arrays of `params` may be in files; each is read when it is used.
  """
  if not lora.is_adapted(params):
    return params
  return _whole(lora_merge.merge, params, part=part)


def _whole(prepare: Callable, params, *, part: str):
  """Parameters of the model by part; those of `part` are made by `prepare`."""
  parts, adapted = params[base.FROZEN][lora.PARAMS], of_part(params, part=part)
  trained = {
    k: x for k, x in params.items() if k not in (lora.ADAPTER, base.FROZEN)
  }
  return parts | {part: prepare(adapted)} | trained
