"""Gradient steps, in two stages: `gradient` adds up over rows, `apply` is one.

A loss is a sum of means whose denominators belong to the whole minibatch. A
piece of it knows only its own share, so what travels is each numerator's
gradient with its share of the denominator; `apply` divides, once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from stages import base, metrics


class Gradient(NamedTuple):
  """What one piece of a minibatch has to say to the optimizer.

  Attributes:
    numerators: a tree like the parameters for each distinct denominator.
    denominators: this piece's share of each.
    info: metrics.
  """

  numerators: tuple[base.Params, ...]
  denominators: tuple[jax.Array, ...]
  info: base.Info


def init(params, optimizer: optax.GradientTransformation) -> base.TrainState:
  """The state before the first step."""
  return base.TrainState(
    params, optimizer.init(_wide(params)), jnp.zeros((), jnp.int32)
  )


def _wide(tree):
  """In float32 or wider: in bfloat16, Adam's decay of 0.999 would be 1."""
  return jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree
  )


def gradient(loss: Callable) -> Callable:
  """Returns `params, *batch -> Gradient`, whose pieces add up.

  Args:
    loss: `params, *batch -> means, info`: a tuple of `metrics.Mean`, one for
      each distinct denominator and already weighted, to be minimized in sum.
  """

  def gradient(params, *batch) -> Gradient:
    def numerators(params):
      means, info = loss(params, *batch)
      return tuple(mean.sum for mean in means), (
        tuple(mean.count for mean in means),
        info,
      )

    sums, pullback, (counts, info) = jax.vjp(numerators, params, has_aux=True)
    grads = tuple(
      pullback(tuple(jnp.full_like(s, i == j) for j, s in enumerate(sums)))[0]
      for i in range(len(sums))
    )
    return Gradient(grads, counts, info)

  return gradient


def apply(optimizer: optax.GradientTransformation) -> Callable:
  """Returns `state, Gradient -> state, info`, one step of `optimizer`.

  A gradient that is not finite leaves parameters and moments as they were and
  counts as `train/skipped`; one bad batch must not end a run of days.
  """

  def apply(state: base.TrainState, gradient: Gradient):
    scales = [1.0 / jnp.maximum(d, 1e-6) for d in gradient.denominators]
    grads = jax.tree.map(
      lambda *gs: sum(
        g * s.astype(g.dtype) for g, s in zip(gs, scales, strict=True)
      ),
      *_wide(gradient.numerators),
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    updates, opt_state = optimizer.update(
      grads, state.opt_state, _wide(state.params)
    )
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old),
      (params, opt_state),
      (state.params, state.opt_state),
    )
    one = jnp.ones(())
    info = gradient.info | {
      'train/grad_norm': metrics.Mean(
        jnp.where(finite, norm, 0.0), finite.astype(norm.dtype)
      ),
      'train/skipped': metrics.Mean(1.0 - finite, one),
    }
    info |= _rates(opt_state)
    return base.TrainState(params, opt_state, state.step + 1), info

  return apply


def _rates(opt_state) -> base.Info:
  """Learning rates, of an optimizer that shows what it has."""
  info = {}
  for path, rate in optax.tree.get_all_with_path(opt_state, 'learning_rate'):
    if isinstance(rate, jax.Array):  # And not what computes it.
      critic = any(getattr(part, 'key', None) == 'critic' for part in path)
      name = 'train/lr_critic' if critic else 'train/lr'
      info.setdefault(name, metrics.Mean(rate, jnp.ones(())))
  return info
