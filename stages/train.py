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
  """What one piece of a minibatch has to say to the optimiser.

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
      each distinct denominator and already weighted, to be minimised in sum.
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
  """Learning rates, of an optimiser that shows what it has."""
  info = {}
  for path, rate in optax.tree.get_all_with_path(opt_state, 'learning_rate'):
    if isinstance(rate, jax.Array):  # And not what computes it.
      critic = any(getattr(part, 'key', None) == 'critic' for part in path)
      name = 'train/lr_critic' if critic else 'train/lr'
      info.setdefault(name, metrics.Mean(rate, jnp.ones(())))
  return info


def adamw(
  learning_rate: float,
  *,
  warmup: int = 0,
  decay: int | None = None,
  updates: int = 1,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW behind a clip of the global norm, its rate visible to the metrics.

  Args:
    learning_rate: after the warm-up.
    warmup: steps over which the rate rises linearly; the last has it whole.
    decay: the step at which it has fallen linearly to zero; None keeps it.
    updates: made in a step, as by `grpo(updates=2)`.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled, per unit of learning rate.
    clip_norm: the largest global norm a gradient keeps.
  """
  rate = optax.constant_schedule(learning_rate)
  warmup *= updates
  if warmup > 1:  # Not from zero: an update of nothing is wasted.
    rate = optax.linear_schedule(
      learning_rate / warmup, learning_rate, warmup - 1
    )
  if decay is not None:
    fall = optax.linear_schedule(learning_rate, 0.0, decay * updates - warmup)
    rate = optax.join_schedules([rate, fall], [warmup])
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.inject_hyperparams(optax.adamw)(
      rate, b1=b1, b2=b2, weight_decay=weight_decay
    ),
  )


def actor_critic(
  actor: optax.GradientTransformation,
  critic: optax.GradientTransformation,
  *,
  critic_warmup: int = 0,
  updates: int = 1,
) -> optax.GradientTransformation:
  """An optimiser for what acts, and another for its critic.

  A policy that can already do something has a critic with no idea: what that
  says of actions would undo what the policy can, until it has learned.

  Args:
    actor: for all parameters but the critic's.
    critic: for the critic's.
    critic_warmup: steps at first in which the critic alone learns.
    updates: made in a step, as by `ppo(updates=4, epochs=4)`: 16.
  """
  first = critic_warmup * updates
  if first:
    actor = optax.conditionally_mask(actor, lambda update: update >= first)

  def whose(params):
    if 'critic' not in params:
      raise ValueError(
        'An optimiser for the critic is given, and the policy has none: its '
        f'parameters are of {", ".join(params)}. Give one optimiser for all.'
      )
    return {name: 'critic' if name == 'critic' else 'actor' for name in params}

  return optax.partition({'actor': actor, 'critic': critic}, whose)
