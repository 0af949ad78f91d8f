"""Granularity of log-probabilities: of tokens, of actions or of whole chunks.

A policy in an environment decides a chunk of Z actions of A numbers in a step;
Z is 1 without chunks. Its log-probabilities, and its entropies, have the
dimensions of steps and after them

  'token'   [Z, A]  one for each number, which is a token of OpenVLA,
  'action'  [Z]     their sum over the numbers of an action, or
  'chunk'   []      their sum over the whole chunk.

PPO clips a ratio of each of them, arXiv:2510.06710. Each has the advantage of
its step, and the loss is the mean over all of them. Those of actions that were
not executed, as the episode ended before them, do not count; a whole chunk
counts if its step does.
"""

from collections.abc import Callable
import math
import typing
from typing import Literal

import jax
import jax.numpy as jnp

from stages import base

LogpOf = Literal['token', 'action', 'chunk']


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


def whole(x, leading: int):
  """Sums over all dimensions but the `leading` ones."""
  return x.sum(tuple(range(leading, x.ndim))) if x.ndim > leading else x


def spread(x, like):
  """A number of each step, [B] or [B, T], in the shape of `like`.

  Args:
    x: one number a step.
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
  mask = spread(x.mask, logp)
  if x.steps is not None:
    Z = x.logp.shape[x.mask.ndim]
    z = jnp.arange(Z).reshape((1,) * x.steps.ndim + (Z,))
    executed = (z < x.steps[..., None]).astype(mask.dtype)
    mask *= spread(executed, logp)
  return x._replace(
    logp=logp,
    mask=mask,
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
