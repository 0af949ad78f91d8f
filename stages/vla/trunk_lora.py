"""Adapters in the language model of a vision-language-action policy.

Parameters of such a policy are those of `lora`, with frozen parts of the model
under `base.FROZEN`: towers, projector and language model stay as they are, in
the types to which the model rounds them (`base.Policy.round_params`). The
adapters are trained, and in full all other parts: a critic, the heads of
OpenVLA-OFT, the expert of π0.

These parts are rounded as in the policy itself. Adapters are not, as in `lora`.
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
  """A policy whose weights are frozen, with adapters that are trained.

  Args:
    policy: whose parameters are those of a model by its parts.
    settings: rank, alpha and targets.
    frozen_parts: names of the parts that are frozen.
    part: that of them which has adapters.
    prefix: of names of its tensors in files of adapters; None where there are
      no such files.

  Raises:
    CheckpointError: for an adapter to start from that does not fit.
    ValueError: for one where there are no files of adapters, or for quantized
      weights, which are not supported.
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
    # Rounding does not change the model, and nothing is added to the weights.
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
  """Parameters of the part with adapters, as those of `lora` alone."""
  frozen = params[base.FROZEN]
  own = {
    lora.PARAMS: frozen[lora.PARAMS][part],
    lora.ALPHA: frozen[lora.ALPHA],
  }
  return {lora.ADAPTER: params[lora.ADAPTER], base.FROZEN: own}


def merge(params, *, part: str):
  """Parameters of the model with the adapters added to its weights."""
  return _whole(lora.merge, params, part=part)


def merge_if_adapted(params, *, part: str):
  """The whole model, as `merge`; the given parameters if nothing is adapted.

  They may be in files, from which each array is read when it is used.
  """
  if not lora.is_adapted(params):
    return params
  return _whole(lora_merge.merge, params, part=part)


def _whole(prepare: Callable, params, *, part: str):
  """The parts of the model, with the language model that `prepare` makes."""
  parts, adapted = params[base.FROZEN][lora.PARAMS], of_part(params, part=part)
  trained = {
    k: x for k, x in params.items() if k not in (lora.ADAPTER, base.FROZEN)
  }
  return parts | {part: prepare(adapted)} | trained
