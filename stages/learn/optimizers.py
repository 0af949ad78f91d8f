"""Optimizers whose learning rates appear in the metrics."""

import optax


def adamw(
  learning_rate: float,
  *,
  warmup_steps: int = 0,
  decay_steps: int | None = None,
  updates_per_step: int = 1,
  b1: float = 0.9,
  b2: float = 0.999,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW behind a clip of the global norm, its rate visible to the metrics.

  Args:
    learning_rate: after the warm-up.
    warmup_steps: steps over which the rate rises linearly to its full value.
    decay_steps: the step by which the rate has fallen linearly to zero; None
      keeps it constant.
    updates_per_step: updates in a step of the workflow, minibatches × epochs.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled, per unit of learning rate.
    clip_norm: the largest global norm a gradient keeps.
  """
  rate = optax.constant_schedule(learning_rate)
  warmup = warmup_steps * updates_per_step
  if warmup > 1:  # Not from zero: an update of nothing is wasted.
    rate = optax.linear_schedule(
      learning_rate / warmup, learning_rate, warmup - 1
    )
  if decay_steps is not None:
    fall = optax.linear_schedule(
      learning_rate, 0.0, decay_steps * updates_per_step - warmup
    )
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
  critic_warmup_steps: int = 0,
  updates_per_step: int = 1,
) -> optax.GradientTransformation:
  """An optimizer for what acts, and another for its critic.

  A policy that can already do something has a critic with no idea: what that
  says of actions would undo what the policy can, until it has learned.

  Args:
    actor: for all parameters but the critic's.
    critic: for the critic's.
    critic_warmup_steps: steps at first in which the critic alone learns.
    updates_per_step: updates in a step of the workflow, minibatches × epochs.
  """
  first = critic_warmup_steps * updates_per_step
  if first:
    actor = optax.conditionally_mask(actor, lambda update: update >= first)

  def whose(params):
    if 'critic' not in params:
      raise ValueError(
        'An optimizer for the critic is given, and the policy has none: its '
        f'parameters are of {", ".join(params)}. Give one optimizer for all.'
      )
    return {name: 'critic' if name == 'critic' else 'actor' for name in params}

  return optax.partition({'actor': actor, 'critic': critic}, whose)
