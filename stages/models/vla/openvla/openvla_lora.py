"""Adapters in the language model of OpenVLA and OpenVLA-OFT.

Parameters of such a policy are those of `lora`, with the parts of the model
under `base.FROZEN`: towers, projector and language model stay as they are. The
adapters are trained, and in full a critic and the heads of OpenVLA-OFT.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from stages import base
from stages.models import lora

LLAMA = 'llama'
FROZEN_PARTS = ('dino', 'siglip', 'projector', LLAMA)


def wrap(policy: base.Policy, settings: lora.Lora) -> base.Policy:
  """A policy whose weights are frozen, with adapters that are trained.

  Args:
    policy: of OpenVLA or OpenVLA-OFT.
    settings: rank, alpha and targets.

  Raises:
    ValueError: for an adapter to start from, which is not supported.
  """
  if settings.adapter:
    raise ValueError(
      'Adapters of VLAs start anew: leave out `adapter`, or add it to the '
      'weights of the checkpoint first.'
    )

  def init(key):
    params = dict(policy.init(key))
    frozen = {part: params.pop(part) for part in FROZEN_PARTS}
    key = jax.random.fold_in(key, 2)
    adapter = lora.init(frozen[LLAMA], settings, key)
    alpha = lora.DEFAULT_ALPHA if settings.alpha is None else settings.alpha
    own = {lora.PARAMS: frozen, lora.ALPHA: jnp.float32(alpha)}
    return {lora.ADAPTER: adapter, base.FROZEN: own} | params

  def adapted(function: Callable | None, prepare: Callable):
    if function is None:
      return None

    @functools.wraps(function)
    def run(params, *args, **kwargs):
      return function(prepare(params), *args, **kwargs)

    return run

  joined = functools.partial(_whole, lora.join)
  return policy._replace(
    init=init,
    act=adapted(policy.act, merge),
    evaluate=adapted(policy.evaluate, joined),
    value=adapted(policy.value, joined),
    imitation_loss=adapted(policy.imitation_loss, joined),
  )


def merge(params):
  """Parameters of the model with the adapters added to its weights."""
  return _whole(lora.merge, params)


def _whole(prepare: Callable, params):
  """The parts of the model, with the language model that `prepare` makes."""
  frozen = params[base.FROZEN]
  parts = frozen[lora.PARAMS]
  adapted = {
    lora.ADAPTER: params[lora.ADAPTER],
    base.FROZEN: {lora.PARAMS: parts[LLAMA], lora.ALPHA: frozen[lora.ALPHA]},
  }
  trained = {
    k: x for k, x in params.items() if k not in (lora.ADAPTER, base.FROZEN)
  }
  return parts | {LLAMA: prepare(adapted)} | trained
