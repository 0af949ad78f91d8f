"""Routing replay: a trainer uses the experts that were chosen while sampling.

Small differences between sampling and training, such as those of bfloat16, send
some tokens to other experts, whose probabilities of the next token may be far
apart. With replay, the trainer takes the recorded experts in place of the
likeliest ones; their weights are those of its own router, which is trained
through them (rollout routing replay, arXiv:2510.11370).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt

from stages.models import config as config_lib
from stages.models.layers import mixture


class Routing(NamedTuple):
  """The experts of each token that was read while sampling, k in each layer.

  Attributes:
    prompt: experts of the tokens of prompts but the last; arbitrary on padding.
    completion: experts of the token that was read before each action: the last
      one of the prompt, then those of the completion. Arbitrary after its end.
  """

  prompt: UInt[Array, 'B P L k']
  completion: UInt[Array, 'B T L k']


def check(config: config_lib.Config):
  """Refuses to replay the routing of a model that has none.

  Raises:
    ValueError: if the model has no experts.
  """
  if not config.E:
    raise ValueError(
      'replay_routing is on, and this model has no experts to replay: set it '
      'to False (REPLAY in gin).'
    )


def empty(config: config_lib.Config, rows: int, columns: int):
  """Room for the experts of tokens, [rows, columns, L, k]."""
  shape = (rows, columns, config.L, config.experts_per_token)
  return jnp.zeros(shape, jnp.uint8 if config.E <= 2**8 else jnp.uint16)


def put(recorded, t, experts):
  """Writes the experts [B, 1, k] of each layer to column `t`; None to none."""
  if recorded is None:
    return None
  new = jnp.stack(experts, axis=2).astype(recorded.dtype)
  return jax.lax.dynamic_update_slice_in_dim(recorded, new, t, axis=1)


def joined(prompt, completion, group_size: int) -> Routing | None:
  """The experts of rows, from those of the prompts of groups; None of None."""
  if completion is None:
    return None
  return Routing(jnp.repeat(prompt, group_size, axis=0), completion)


def of_prompts(config: config_lib.Config, left):
  """The experts of prompts, [N, P, L, k].

  Args:
    config: the model.
    left: collections that layers have left what their routers found in.
  """
  found = left[mixture.ROUTING]['layers'][mixture.ROUTING]
  expert = jnp.moveaxis(found.expert, 0, 2)
  return expert.astype(empty(config, 0, 0).dtype)


def by_layer(expert):
  """Recorded experts as layers read them: variables of the model.

  Args:
    expert: those of each position, of [rows, positions, L, k].
  """
  expert = jnp.moveaxis(expert, 2, 0).astype(jnp.int32)
  return {mixture.REPLAYED: {'layers': {mixture.REPLAYED: expert}}}


def padded(routing: Routing, group_size: int):
  """Experts of the prompts of groups, then of their completions end to end."""
  prompt = routing.prompt[::group_size]
  N = prompt.shape[0]
  own = routing.completion.reshape(N, -1, *prompt.shape[2:])
  return jnp.concatenate([prompt, own], axis=1)
