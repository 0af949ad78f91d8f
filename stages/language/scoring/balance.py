"""The balance of experts: a loss of each sequence, and the load of experts.

  L = Σₑ fₑ Pₑ,   fₑ = E / (k n) · Σₜ 1[e is an expert of token t],
  Pₑ = 1 / n · Σₜ pₜₑ

n tokens of a sequence have k of E experts each, and pₜₑ is the probability of
the router. It is the sequence-wise loss of DeepSeek-V3, arXiv:2412.19437 eq. 17
to 20, as a mean over layers. It is 1 where all experts are used and likely
alike, and E / k where the same k experts have all tokens and all probability.
Only P has a gradient.

A sequence is what the model reads to predict a completion: the prompt, and the
completion but for its last token. Each has its own f, unlike in the loss of
Switch Transformer (arXiv:2101.03961), whose f is that of a whole batch. So the
loss is a mean over sequences, and does not depend on how a batch is cut.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stages import base
from stages.language.decoding import prefill
from stages.language.scoring import packing
from stages.models.layers import attention, mixture


class Balance(NamedTuple):
  """The evenness with which sequences use experts.

  Attributes:
    loss: the loss of a sequence, on each token of its completion.
    load: tokens of each expert, summed over sequences.
  """

  loss: Float[Array, 'B T']
  load: Float[Array, 'L E']


def check(policy: base.Policy, balance_coef: float):
  """Refuses a loss that a policy cannot reduce.

  Raises:
    ValueError: if the policy has no router, or does not train it.
  """
  if balance_coef and not policy.trains_router:
    raise ValueError(
      f'balance_coef is {balance_coef}, and this policy trains no router: its '
      'model has no experts, or its weights are frozen beside adapters. Set '
      'balance_coef to 0.'
    )


def of_packed(routing, segment: attention.Segment) -> Balance:
  """The balance of packed rows, at each of their positions.

  Args:
    routing: `mixture.Routing` of each layer, stacked.
    segment: what the positions belong to.
  """
  return _of_sequences(routing, segment, segment.group >= 0)


def of_padded(
  routing, prompt: base.Prompt, mask_BT, group_size: int
) -> Balance:
  """The balance of completions that were read together, padded.

  Args:
    routing: `mixture.Routing` of each layer, stacked; positions are those of a
      prompt, then those of the completions of its group, end to end.
    prompt: prompts of the completions.
    mask_BT: 1 on tokens that are scored. The tokens before them count, too.
    group_size: adjacent rows that share a prompt.
  """
  split = prefill.split_prompt(prompt, group_size)
  (N, P), (B, T) = split.mask_NP.shape, mask_BT.shape
  is_read_BT = jnp.arange(T)[None] < packing.lengths(mask_BT)[:, None]
  row_BT = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T))

  def packed(x_NP, x_BT):
    return jnp.concatenate([x_NP, x_BT.reshape(N, -1)], axis=1)

  row_NS = packed(jnp.full((N, P), -1), row_BT)
  segment = attention.Segment(jnp.zeros_like(row_NS), row_NS)
  is_read_NS = packed(split.mask_NP > 0, is_read_BT)
  found = _of_sequences(routing, segment, is_read_NS)
  return found._replace(loss=found.loss[:, P:].reshape(B, T))


def _of_sequences(
  routing: mixture.Routing, segment: attention.Segment, is_read_MS
) -> Balance:
  """The balance of the sequence of each position, and of all sequences.

  Args:
    routing: that of each layer, stacked.
    segment: of each position. Those of a completion are adjacent, and so are
      those of a group.
    is_read_MS: false on padding, which a completion does not start with.
  """
  row_MS = segment.group if segment.row is None else segment.row
  starts_group_MS = _differs(segment.group)
  starts_MS = starts_group_MS | _differs(row_MS)
  # Of a completion, also that of a whole sequence in groups of one.
  is_own_MS = is_read_MS & (row_MS >= 0)
  own = _summed(is_own_MS, starts_MS)
  ahead = _summed(is_read_MS & ~is_own_MS, starts_group_MS)
  one_MS1 = jnp.ones_like(routing.prob[0, ..., :1])

  def whole(x_MSE):
    return own(x_MSE) + ahead(x_MSE)

  length_MS1 = jnp.maximum(whole(one_MS1), 1)
  counts_MS1 = (is_own_MS & starts_MS)[..., None]

  @jax.checkpoint
  def layer(routing: mixture.Routing):
    E, k = routing.prob.shape[-1], routing.expert.shape[-1]
    chosen_MSE = jax.nn.one_hot(routing.expert, E, dtype=one_MS1.dtype).sum(-2)
    count_MSE = whole(chosen_MSE)
    f_MSE = E / (k * length_MS1) * count_MSE
    p_MSE = whole(routing.prob) / length_MS1
    # A sequence counts once, not once for each token of its completion.
    load_MSE = jnp.where(counts_MS1, count_MSE, 0)
    return (f_MSE * p_MSE).sum(-1), load_MSE.sum((0, 1))

  loss_LMS, load_LE = jax.lax.map(layer, routing)
  return Balance(loss_LMS.mean(0), load_LE)


def _summed(is_added_MS, starts_MS) -> Callable:
  """Returns `x_MSE -> sum_MSE` over the run of positions that each is in.

  Args:
    is_added_MS: the positions that are added up.
    starts_MS: the first position of each run.
  """
  run_MS = jnp.cumsum(starts_MS, axis=1, dtype=jnp.int32) - 1
  S = run_MS.shape[1]

  def one(x_SE, run_S):
    sum_SE = jax.ops.segment_sum(x_SE, run_S, S, indices_are_sorted=True)
    return sum_SE[run_S]

  def summed(x_MSE):
    x_MSE = jnp.where(is_added_MS[..., None], x_MSE, 0)
    return jax.vmap(one)(x_MSE, run_MS)

  return summed


def _differs(x_MS):
  """Whether a position differs from the one before it; true for the first."""
  is_other = x_MS[:, 1:] != x_MS[:, :-1]
  return jnp.pad(is_other, ((0, 0), (1, 0)), constant_values=True)
