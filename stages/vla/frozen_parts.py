"""Parts of a vision-language-action model that are not trained.

All models have the same names for them: 'vision' for the vision towers,
'projector' for what maps their features to the language model, and 'language'
for the language model. What else a model has is always trained: a critic, the
heads of OpenVLA-OFT and its FiLM, the expert of π0.

Parameters of frozen parts are under `base.FROZEN`, in the types to which the
model rounds them. They have no gradients and no moments, and where no trained
part comes before a frozen one, no gradient is computed through it.
"""

from collections.abc import Collection, Mapping
import typing
from typing import Literal

from stages import base
from stages.models import lora as lora_lib

Part = Literal['vision', 'projector', 'language']
PARTS = typing.get_args(Part)


def check(
  frozen: Collection[Part], lora: lora_lib.Lora | None, others: Collection[str]
):
  """Refuses to freeze unknown parts, any beside adapters, or all of a model.

  Args:
    frozen: parts that are to be frozen.
    lora: adapters of the language model; None or rank 0 for none.
    others: names of what the model has beside the three parts.

  Raises:
    ValueError: if there is no such part, adapters freeze these parts already,
      or nothing but a critic would be trained.
  """
  unknown = [x for x in frozen if x not in PARTS]
  if unknown:
    raise ValueError(
      f'`frozen` is {frozen!r}, and {unknown[0]!r} is no part: give a tuple of '
      f"{', '.join(map(repr, PARTS))}, such as ('vision',)."
    )
  if frozen and lora:
    raise ValueError(
      f'`frozen` names {", ".join(frozen)}, and with adapters (`lora`) vision, '
      'projector and language model are all frozen: leave out `frozen`, or the '
      'adapters (LORA_RANK = None in gin, and no LORA_ADAPTER).'
    )
  if not others and {*PARTS} <= {*frozen}:
    raise ValueError(
      '`frozen` names vision, projector and language, and this model has no '
      'other part that decides actions: leave out one of them.'
    )


def freeze(
  policy: base.Policy,
  frozen: Collection[Part],
  subtrees: Mapping[Part, tuple[str, ...]],
) -> base.Policy:
  """A policy with some parts frozen.

  Args:
    policy: a policy whose parameters are a dict of the parts of its model.
    frozen: the parts.
    subtrees: keys of each part in the parameters.
  """
  if not frozen:
    return policy
  names = [name for part in dict.fromkeys(frozen) for name in subtrees[part]]

  def init(key):
    params = dict(policy.init(key))
    own = policy.round_params({k: params.pop(k) for k in names})
    return {base.FROZEN: own} | params

  return policy._replace(
    init=init,
    act=lora_lib.prepared(policy.act, join),
    evaluate=lora_lib.prepared(policy.evaluate, join),
    value=lora_lib.prepared(policy.value, join),
    imitation_loss=lora_lib.prepared(policy.imitation_loss, join),
  )


def join(params):
  """Parameters by part, whether they are frozen or not."""
  trained = {k: x for k, x in params.items() if k != base.FROZEN}
  return trained | params.get(base.FROZEN, {})
