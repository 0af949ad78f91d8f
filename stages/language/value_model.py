"""Value models of texts: a critic's estimate before each token.

  vₜ = w · norm(hₜ)

hₜ is the last hidden state of a transformer that has read the prompt and the
tokens before t, so the same state from which token t is predicted. w is the
head, a vector, and norm is the transformer's last RMSNorm.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stages import base, ranges
from stages.language.scoring import packing, scorer
from stages.models import lora, transformer
from stages.models.layers import mixed_precision


class ValueModel(NamedTuple):
  """Estimates of the return before each token of a completion.

  Attributes:
    init: `key -> params`: those of the whole model, or of the head alone if it
      shares the trunk of the policy.
    value: `params, prompt, action, *, group_size=1, mask=None -> value_BT`. If
      it shares the trunk, `params` are those of the policy, with those of the
      head under the key `base.CRITIC`. With `packed_tokens`, `mask` is needed:
      1 where values are read, which are 0 elsewhere.
    shares_trunk: whether it is a head on the trunk of the policy.
    packed_tokens: room of a packed row in tokens, see `packing`; None without
      packing.
  """

  init: Callable[[base.Key], base.Params]
  value: Callable[..., jax.Array]
  shares_trunk: bool = False
  packed_tokens: int | None = None


def own_trunk(
  config: transformer.Config,
  *,
  init: Callable[[base.Key], base.Params] | None = None,
  packed_tokens: ranges.PositiveInt | None = None,
) -> ValueModel:
  """A value model with a transformer of its own.

  Args:
    config: dimensions of the transformer.
    init: `key -> params`, such as those of a checkpoint; if None, a random
      transformer and a head of zeros.
    packed_tokens: tokens that a packed row has room for; completions are then
      read in packed rows, see `packing`, one on each device at a time. None to
      read all of them together, padded to the longest possible.
  """
  # The head replaces the output layer. With tied embeddings, the transformer
  # has no output matrix.
  config = dataclasses.replace(config, tie_embeddings=True)

  def random(key):
    return transformer.init_params(config, key) | init_head(config)

  def score_states(params, x_BTD, action_BT):
    del action_BT
    return score(config, params['norm_D'], params['value_D'], x_BTD)

  model = transformer.Transformer(config)
  value = scorer.scorer(model, score_states, packed_tokens)
  return ValueModel(init or random, value, packed_tokens=packed_tokens)


def head(
  config: transformer.Config,
  *,
  packed_tokens: ranges.PositiveInt | None = None,
) -> ValueModel:
  """A value model that is one vector on the trunk of the policy.

  Args:
    config: dimensions of the policy's transformer.
    packed_tokens: as in `own_trunk`.
  """

  def score_states(params, x_BTD, action_BT):
    del action_BT
    return head_values(config, params, x_BTD)

  model = transformer.Transformer(config)
  of_params = scorer.scorer(model, score_states, packed_tokens)

  def value(params, *args, **kwargs):
    if lora.is_adapted(params):
      params = lora.join(params)
    return of_params(params, *args, **kwargs)

  return ValueModel(
    lambda key: init_head(config),
    value,
    shares_trunk=True,
    packed_tokens=packed_tokens,
  )


def check_trunk(policy: base.Policy, critic: ValueModel):
  """Refuses a critic on the trunk of a policy that replays routing.

  Its values would be those of other experts before training than during it.
  """
  if critic.shares_trunk and policy.replays_routing:
    raise ValueError(
      'The critic is a head on the transformer of the policy, and '
      "replay_routing is on, which a critic does not follow: set TRUNK='own', "
      'or replay_routing to False (REPLAY in gin).'
    )


def score_completions(model: ValueModel) -> Callable:
  """Returns `params, prompt, action, mask -> score_B` of whole sequences.

  The score is the value after the last token of the mask, as in the sequence
  classifiers of `transformers`, which take the last position that is not
  padding. A model that packs needs room for one more token than a critic.
  """

  def run(params, prompt, action_BT, mask_BT):
    # The value after token T is the value before token T + 1.
    action_BS = jnp.pad(action_BT, ((0, 0), (0, 1)))
    last_B1 = packing.lengths(mask_BT)[:, None]
    is_last_BS = jnp.arange(action_BS.shape[1])[None] == last_B1
    value_BS = model.value(params, prompt, action_BS, mask=is_last_BS)
    return jnp.take_along_axis(value_BS, last_B1, axis=1)[:, 0]

  return run


def init_head(config: transformer.Config, Z: int | None = None) -> base.Params:
  """A head of zeros, so that the first values are zero.

  Args:
    config: dimensions of the transformer.
    Z: number of values of a position; None for one, without a dimension.
  """
  if Z is None:
    return {'value_D': jnp.zeros(config.D, config.param_dtype)}
  return {'value_DZ': jnp.zeros((config.D, Z), config.param_dtype)}


def head_values(config: transformer.Config, params, x_BTD):
  """Values by the head under the key `base.CRITIC` of a policy's parameters."""
  (value,) = params[base.CRITIC].values()
  return score(config, params['norm_D'], value, x_BTD)


def score(config: transformer.Config, norm_D, value, x_BTD):
  """w · norm(h) of each position, in float32 or wider, with w [D] or [D, Z]."""
  scale_D = 1 + norm_D if config.unit_offset else norm_D
  x_BTD = mixed_precision.rms_norm(x_BTD, scale_D, config.norm_epsilon)
  equation = 'BTD,D->BT' if value.ndim == 1 else 'BTD,DZ->BTZ'
  return mixed_precision.product(equation, x_BTD, value)
