"""Optimizers whose learning rates appear in the metrics."""

import jax
import jax.numpy as jnp
import optax

from stages import base, metrics, ranges


def adamw(
  learning_rate: ranges.NonNegativeFloat,
  *,
  warmup_steps: ranges.NonNegativeInt = 0,
  constant_share: ranges.Decay = 0.0,
  decay_steps: ranges.NonNegativeInt | None = None,
  updates_per_step: ranges.PositiveInt = 1,
  b1: ranges.Decay = 0.9,
  b2: ranges.Decay = 0.999,
  eps: ranges.PositiveFloat = 1e-8,
  weight_decay: ranges.NonNegativeFloat = 0.0,
  clip_norm: ranges.PositiveFloat = 1.0,
) -> optax.GradientTransformation:
  """AdamW after clipping by global norm; its learning rate is a metric.

  Steps are those of the workflow, of `updates_per_step` updates each.

  Args:
    learning_rate: learning rate after the warm-up.
    warmup_steps: steps over which the rate rises linearly to its full value.
    constant_share: share of the steps from the warm-up to `decay_steps` that
      keep the full rate, before it falls (warmup-stable-decay, arXiv
      2404.06395, Sec. 4).
    decay_steps: the step by which the rate has fallen linearly to zero; None
      keeps it constant. If that is within the warm-up, the rate is zero after
      it.
    updates_per_step: updates in a step of the workflow, minibatches × epochs.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled weight decay of all parameters, norm scales and
      biases included, per unit of learning rate.
    clip_norm: largest global norm of a gradient.
  """
  rate = optax.constant_schedule(learning_rate)
  warmup = warmup_steps * updates_per_step
  if warmup > 1:  # Not from zero: the first update would change nothing.
    rate = optax.linear_schedule(
      learning_rate / warmup, learning_rate, warmup - 1
    )
  if decay_steps is not None:
    decay = optax.constant_schedule(0.0)
    after = decay_steps * updates_per_step - warmup
    if after > 0:  # Optax reads a decay of no updates as a constant rate.
      constant = min(round(constant_share * after), after - 1)
      decay = optax.linear_schedule(
        learning_rate, 0.0, after - constant, transition_begin=constant
      )
    rate = optax.join_schedules([rate, decay], [warmup])
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.inject_hyperparams(optax.adamw)(
      rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
    ),
  )


def actor_critic(
  actor: optax.GradientTransformation,
  critic: optax.GradientTransformation,
  *,
  critic_warmup_steps: ranges.NonNegativeInt = 0,
  updates_per_step: ranges.PositiveInt = 1,
) -> optax.GradientTransformation:
  """One optimizer for the critic's parameters, another for all others.

  The critic's are those under the key `base.CRITIC` (see `base.Policy.init`).
  With `critic_warmup_steps`, a pretrained actor is kept unchanged until its new
  critic has learned; advantages by an untrained critic would spoil it.

  Args:
    actor: optimizer of all parameters but the critic's.
    critic: optimizer of the critic's parameters.
    critic_warmup_steps: first steps, in which only the critic learns.
    updates_per_step: updates in a step of the workflow, minibatches × epochs.
  """
  actor = delayed(actor, critic_warmup_steps, updates_per_step)

  def labels(params):
    if base.CRITIC not in params:
      raise ValueError(
        'actor_critic has an optimizer for the critic, and this policy has no '
        f'critic: its parameters are {", ".join(params)}. Use one optimizer '
        'for all parameters, such as adamw.'
      )
    return {
      name: base.CRITIC if name == base.CRITIC else 'actor' for name in params
    }

  return optax.partition({'actor': actor, base.CRITIC: critic}, labels)


def delayed(
  optimizer: optax.GradientTransformation, steps: int, updates_per_step: int = 1
) -> optax.GradientTransformation:
  """Changes nothing in the first steps; schedules start after them.

  Args:
    optimizer: the optimizer from then on.
    steps: first steps, in which parameters stay as they are.
    updates_per_step: updates in a step of the workflow, minibatches × epochs.
  """
  first = steps * updates_per_step
  if not first:
    return optimizer
  return optax.conditionally_mask(optimizer, lambda update: update >= first)


def learning_rates(opt_state) -> base.Info:
  """Reads the learning rates of an optimizer that keeps them in its state.

  `train/lr`, and `train/lr_critic` of the critic's part of `actor_critic`.
  """
  info = {}
  for path, rate in optax.tree.get_all_with_path(opt_state, 'learning_rate'):
    if isinstance(rate, jax.Array):  # Skips the schedule of the same name.
      critic = any(getattr(part, 'key', None) == base.CRITIC for part in path)
      name = 'train/lr_critic' if critic else 'train/lr'
      info.setdefault(name, metrics.Mean(rate, jnp.ones(())))
  return info
