"""Gradient steps in two stages: `gradient` sums over rows, `apply` updates.

A loss is a sum of means whose denominators belong to the whole minibatch. A
piece of the minibatch knows only its share of them, so `gradient` returns the
gradient of each numerator and the piece's share of its denominator; both add
up, and `apply` divides once. `learner` runs both over several minibatches.

Parameters under the key `base.FROZEN`, such as weights beside an adapter, are
read by `gradient` alone: they have no gradients and no moments, and a plan
places them once, as they pass through a step unchanged.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.learn import optimizers


class Loss(NamedTuple):
  """Result of a loss function.

  Attributes:
    means: one mean for each distinct denominator, already weighted; their sum
      is minimized.
    info: metrics.
    kl: mean KL(π_old‖π), by which `learner` stops early; None without it.
    count: actions that the loss counts, Σ m; None where it is the sum of the
      denominators.
  """

  means: tuple[metrics.Mean, ...]
  info: base.Info
  kl: metrics.Mean | None = None
  count: jax.Array | None = None


class Gradient(NamedTuple):
  """The contribution of one piece of a minibatch; pieces add up.

  Attributes:
    numerators: a tree like the trainable parameters for each distinct
      denominator.
    denominators: this piece's share of each.
    info: metrics.
    kl: as in `Loss`.
    count: this piece's share, likewise.
  """

  numerators: tuple[base.Params, ...]
  denominators: tuple[jax.Array, ...]
  info: base.Info
  kl: metrics.Mean | None = None
  count: jax.Array | None = None


def init(params, optimizer: optax.GradientTransformation) -> base.TrainState:
  """Returns the state before the first update."""
  moments = optimizer.init(_at_least_float32(trainable(params)))
  return base.TrainState(params, moments, jnp.zeros((), jnp.int32))


def trainable(params):
  """The parameters without those that are frozen."""
  if isinstance(params, dict) and base.FROZEN in params:
    return {k: x for k, x in params.items() if k != base.FROZEN}
  return params


def with_frozen(trained, params):
  """Trained parameters together with the frozen ones of `params`, if any."""
  if isinstance(params, dict) and base.FROZEN in params:
    return trained | {base.FROZEN: params[base.FROZEN]}
  return trained


def version(state: base.TrainState) -> base.Version:
  """The parameters of a state, with the number of updates that made them."""
  return base.Version(state.params, state.step)


def snapshot(version: base.Version) -> base.Version:
  """A version to carry from step to step: without frozen parameters."""
  return version._replace(params=trainable(version.params))


def delayed(past: tuple[base.Version, ...], now: base.Version):
  """Takes the oldest version from a delay line, and puts `now` at its end.

  Args:
    past: snapshots, the oldest first.
    now: the version of this step.

  Returns:
    The oldest version, with frozen parameters, and the line of the next step.
  """
  oldest, *rest = *past, snapshot(now)
  params = with_frozen(oldest.params, now.params)
  return oldest._replace(params=params), tuple(rest)


def _at_least_float32(tree):
  """Casts to float32 or wider; in bfloat16 Adam's decay of 0.999 would be 1."""
  return jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree
  )


def learner(
  loss: Callable,
  optimizer: optax.GradientTransformation,
  *,
  unbatched: tuple[int, ...] = (0,),
  group_size: int = 1,
  divisible_groups: bool = False,
  target_kl: float | None = None,
  prefix: str = '',
) -> Callable:
  """Makes an update for each of several minibatches.

  Args:
    loss: `params, *given, *minibatch -> Loss`, or its first two fields.
    optimizer: optimizer of the parameters.
    unbatched: positions of the loss's arguments without rows: the parameters
      and the `given` arguments.
    group_size: adjacent rows of a group.
    divisible_groups: whether the loss takes parts of groups, as one does that
      compares no rows; see `stages.Stage`.
    target_kl: the remaining minibatches change nothing once the KL of one is
      beyond this; None always makes all updates.
    prefix: of the names of its stages, where a workflow has several learners.

  Returns:
    `state, minibatches, *given -> state, info`: metrics are those of all
    minibatches together.
  """
  gradient_stage = stages.Stage(
    gradient(loss),
    f'{prefix}gradient',
    'sum',
    unbatched,
    group_size=group_size,
    divisible_groups=divisible_groups,
  )
  update = apply(optimizer)
  if target_kl is not None:
    update = apply_until(optimizer, target_kl)
  apply_stage = stages.Stage(update, f'{prefix}apply', 'batch')
  merge_info = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos),
    f'{prefix}merge_info',
    'batch',
  )
  never = stages.Stage(lambda step: jnp.zeros((), bool), 'kl_stop', 'batch')

  def learn(state: base.TrainState, minibatches, *given):
    infos, stopped = [], () if target_kl is None else (never(state.step),)
    for minibatch in minibatches:
      grads = gradient_stage(state.params, *given, *minibatch)
      params = state.params
      state = state._replace(params=trainable(params))
      state, *stopped, info = apply_stage(state, *stopped, grads)
      state = state._replace(params=with_frozen(state.params, params))
      infos.append(info)
    return state, infos[0] if len(infos) == 1 else merge_info(*infos)

  return learn


def gradient(loss: Callable) -> Callable:
  """Returns `params, *batch -> Gradient`, whose pieces add up.

  Args:
    loss: `params, *batch -> Loss`, or its first two fields.
  """

  def gradient(params, *batch) -> Gradient:
    def numerators(trained):
      result = Loss(*loss(with_frozen(trained, params), *batch))
      return tuple(mean.sum for mean in result.means), (
        tuple(mean.count for mean in result.means),
        result.info,
        result.kl,
        result.count,
      )

    sums, pullback, (denominators, *rest) = jax.vjp(
      numerators, trainable(params), has_aux=True
    )
    grads = tuple(
      pullback(tuple(jnp.full_like(s, i == j) for j, s in enumerate(sums)))[0]
      for i in range(len(sums))
    )
    return Gradient(grads, denominators, *rest)

  return gradient


def apply(optimizer: optax.GradientTransformation) -> Callable:
  """Returns `state, Gradient -> state, info`, one update of `optimizer`.

  A gradient that is not finite changes neither parameters nor moments and
  counts as `train/skipped`, so that one bad batch does not end a long run. Nor
  does that of a minibatch without a single action that counts, where moments
  and weight decay alone would move the parameters; it is not counted.
  """

  def apply(state: base.TrainState, gradient: Gradient):
    scales = [1.0 / jnp.maximum(d, 1e-6) for d in gradient.denominators]
    grads = jax.tree.map(
      lambda *gs: sum(
        g * s.astype(g.dtype) for g, s in zip(gs, scales, strict=True)
      ),
      *_at_least_float32(gradient.numerators),
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    count = gradient.count
    is_empty = (sum(gradient.denominators) if count is None else count) == 0
    is_made = finite & ~is_empty
    updates, opt_state = optimizer.update(
      grads, state.opt_state, _at_least_float32(state.params)
    )
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(is_made, new, old),
      (params, opt_state),
      (state.params, state.opt_state),
    )
    one = jnp.ones(())
    info = gradient.info | {
      'train/grad_norm': metrics.Mean(
        jnp.where(is_made, norm, 0.0), is_made.astype(norm.dtype)
      ),
      'train/skipped': metrics.Mean(1.0 - finite, one),
    }
    info |= optimizers.learning_rates(opt_state)
    return base.TrainState(params, opt_state, state.step + 1), info

  return apply


def apply_until(
  optimizer: optax.GradientTransformation, target_kl: float
) -> Callable:
  """Returns `state, stopped, Gradient -> state, stopped, info`.

  As `apply`, but an update whose KL is beyond `target_kl`, and every update
  after it, leaves the state unchanged and counts as `train/stopped`.
  """
  update = apply(optimizer)

  def apply_unless_stopped(state: base.TrainState, stopped, gradient: Gradient):
    new, info = update(state, gradient)
    stopped |= gradient.kl.sum > target_kl * gradient.kl.count
    new = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), state, new)
    one = jnp.ones(())
    info['train/stopped'] = metrics.Mean(stopped * one, one)
    return new, stopped, info

  return apply_unless_stopped
