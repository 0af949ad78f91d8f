"""Granularity of log-probabilities and values: tokens, actions or chunks.

A policy in an environment decides a chunk of Z actions of A numbers in a step;
Z is 1 without chunks. Its log-probabilities, and its entropies, have the
dimensions of steps and after them

  'token'   [Z, A]  one for each number, which is a token of OpenVLA,
  'action'  [Z]     their sum over the numbers of an action, or
  'chunk'   []      their sum over the whole chunk.

PPO clips a ratio of each of them, arXiv:2510.06710. Rewards, values and
advantages have the dimensions of steps, one for a 'chunk', or are those of each
'action', [Z]. A ratio has the advantage of its action or of its step, and the
loss is the mean over all ratios. Those of actions that were not executed, as
the episode ended before them, do not count; a whole chunk counts if its step
does.
"""

from collections.abc import Callable
import math
import typing
from typing import Literal

import jax
import jax.numpy as jnp

from stages import base

LogpOf = Literal['token', 'action', 'chunk']
ValueOf = Literal['action', 'chunk']


def reducer(
  logp_of: LogpOf, chunk: int = 1
) -> Callable[[jax.Array], jax.Array]:
  """Returns `[..., Z A] -> [..., Z, A], [..., Z] or [...]`, which sums.

  Args:
    logp_of: what has a log-probability.
    chunk: Z.

  Raises:
    ValueError: if `logp_of` is unknown.
  """
  names = typing.get_args(LogpOf)
  if logp_of not in names:
    raise ValueError(
      f'logp_of is {logp_of!r}, and log-probabilities are those of '
      f'{", ".join(map(repr, names))}: give one of these.'
    )
  axes = {'token': (), 'action': (-1,), 'chunk': (-2, -1)}[logp_of]

  def reduce(x):
    x = x.reshape(*x.shape[:-1], chunk, -1)
    return x.sum(axes) if axes else x

  return reduce


def num_values(value_of: ValueOf, logp_of: LogpOf, chunk: int) -> int | None:
  """Values of a step: `chunk` of them, or None for one without a dimension.

  Args:
    value_of: what has a value.
    logp_of: what has a log-probability.
    chunk: Z.

  Raises:
    ValueError: if `value_of` is unknown, or actions have values and not
      log-probabilities.
  """
  names = typing.get_args(ValueOf)
  if value_of not in names:
    raise ValueError(
      f'value_of is {value_of!r}, and values are those of '
      f'{" or ".join(map(repr, names))}: give one of these.'
    )
  if value_of == 'chunk':
    return None
  if logp_of == 'chunk':
    raise ValueError(
      "value_of is 'action', so that each action has an advantage, and "
      "logp_of is 'chunk', which has one ratio for all of them: set logp_of to "
      "'action' or 'token', or leave out `value_of`."
    )
  return chunk


def executed(mask, steps, like):
  """The mask of steps, and of each action where `like` has one for each.

  Args:
    mask: 1 for steps that count.
    steps: actions of each step that were executed; None for all.
    like: an array in the dimensions of `mask`, and maybe more, the first of
      which is that of the actions of a chunk; its own mask ends in that.
  """
  if like.ndim == mask.ndim:
    return mask
  Z = like.shape[mask.ndim]
  z = jnp.arange(Z).reshape((1,) * mask.ndim + (Z,))
  of_actions = jnp.broadcast_to(mask[..., None], (*mask.shape, Z))
  if steps is None:
    return of_actions
  return of_actions * (z < steps[..., None]).astype(mask.dtype)


def whole(x, leading: int):
  """Sums over all dimensions but the `leading` ones."""
  return x.sum(tuple(range(leading, x.ndim))) if x.ndim > leading else x


def spread(x, like):
  """Numbers of steps or of actions, in the shape of `like`.

  Args:
    x: one number a step, [B] or [B, T], or one an action, with [Z] behind.
    like: an array of the same steps, as `by_row` makes it.
  """
  parts = math.prod(like.shape) // math.prod(x.shape)
  if parts == 1:
    return x.reshape(like.shape)
  return jnp.repeat(x.reshape(x.shape[0], -1), parts, axis=1)


def by_row(experience: base.Experience) -> base.Experience:
  """The experience with an advantage and a mask for each log-probability.

  Of [B, T] steps with n log-probabilities each, it is [B, T · n]; of [B] steps,
  [B, n]. Experience with one for each step is returned as it is.

  Args:
    experience: of [B] or [B, T] steps. Observations and actions stay as they
      are; fields that no term of a loss with ratios reads do, too.
  """
  x = experience
  if x.logp.ndim == x.mask.ndim:
    return x
  logp = x.logp.reshape(x.logp.shape[0], -1)
  return x._replace(
    logp=logp,
    mask=spread(executed(x.mask, x.steps, x.logp), logp),
    advantage=None if x.advantage is None else spread(x.advantage, logp),
    proximal=None if x.proximal is None else x.proximal.reshape(logp.shape),
  )


def evaluation_by_row(
  now: base.Evaluation, experience: base.Experience
) -> base.Evaluation:
  """Log-probabilities and entropies in the shape of those of `by_row`.

  Raises:
    ValueError: if the policy has log-probabilities of other things when it acts
      than when it is evaluated.
  """
  shape = experience.logp.shape
  if math.prod(now.logp.shape) != math.prod(shape):
    raise ValueError(
      f'The policy returns log-probabilities {[*now.logp.shape]} from '
      f'`evaluate`, and {[*shape]} were recorded from `act`: both must be of '
      'the same tokens, actions or chunks.'
    )
  return now._replace(
    logp=now.logp.reshape(shape), entropy=now.entropy.reshape(shape)
  )
