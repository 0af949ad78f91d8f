"""Optimizers whose learning rates appear in the metrics."""

import optax


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
  """An optimizer for what acts, and another for its critic.

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
        'An optimizer for the critic is given, and the policy has none: its '
        f'parameters are of {", ".join(params)}. Give one optimizer for all.'
      )
    return {name: 'critic' if name == 'critic' else 'actor' for name in params}

  return optax.partition({'actor': actor, 'critic': critic}, whose)
