"""Losses and updates of soft actor-critic, arXiv:1812.05905.

With layer normalization in the critics, several of them and a random subset in
the target, it is RLPD's learner, arXiv:2302.02348.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, core, metrics, repeat
from stages.envs import replay
from stages.envs.rollouts import obs_stats
from stages.learn import train_step
from stages.models.control import critics as critics_lib


class Critics(NamedTuple):
  """State of the critics within a step.

  Attributes:
    critic: parameters and optimizer state of all critics.
    target: Polyak average of their parameters.
    round: updates made so far in this step.
    info: metrics of those updates; `{}` before the first.
  """

  critic: base.TrainState
  target: base.Params
  round: jax.Array
  info: base.Info


class Learner(NamedTuple):
  """Soft actor-critic apart from its environments.

  Attributes:
    init: `actor_key, critic_key -> actor, critic, target`. The actor's
      parameters are {'policy', 'log_temperature'}.
    update: all updates of a step: `actor, (critic, target), obs_stats, warm,
      sample, key -> actor, (critic, target), info`. `warm` is true while
      nothing is learned; `sample` holds the minibatches of all updates, one
      after the other.
  """

  init: Callable
  update: Callable


def learner(
  policy: base.Policy,
  critic: critics_lib.Critic,
  optimizer: optax.GradientTransformation,
  *,
  init_temperature: float,
  num_updates: int,
  actor_update_period: int,
  tau: float,
  critic_subset: int | None,
  target_entropy: float,
) -> Learner:
  """Makes the first state of actor and critics, and the updates of a step.

  Args:
    policy: the actor.
    critic: the critics.
    optimizer: optimizer of the actor, and of the critics.
    init_temperature: initial α.
    num_updates: updates of the critics in a step.
    actor_update_period: of these, updates for each one of the actor.
    tau: τ of the Polyak average.
    critic_subset: as in `sac`.
    target_entropy: H, as in `sac`.
  """
  update = train_step.apply(optimizer)
  critic_loss = critic_objective(policy, critic, critic_subset)
  actor_loss = actor_objective(policy, critic, critic_subset, target_entropy)
  update_critics = repeat.Repeat(
    critic_updater(critic_loss, update, num_updates, tau),
    'critic_updates',
    actor_update_period,
  )
  update_actor = actor_updater(actor_loss, update, num_updates)

  def update_both(carry, stats, warm, sample, key):
    """Some updates of the critics, and one of the actor."""
    critics, actor, info = carry
    critics = update_critics(critics, actor.params, stats, warm, sample, key)
    actor, info = update_actor(actor, info, critics, stats, warm, sample)
    return (critics, actor, info), None

  updates = repeat.Repeat(
    update_both, 'updates', num_updates // actor_update_period
  )
  first_info = stages.Stage(
    functools.partial(_first_info, update_both), 'first_info', 'batch'
  )

  def learn(actor, critics, *given):
    round_, critic_info, info = first_info(actor, *critics, *given)
    carry = Critics(*critics, round_, critic_info), actor, info
    after, actor, info = updates(carry, *given)
    return actor, (after.critic, after.target), after.info | info

  init = functools.partial(_init, policy, critic, optimizer, init_temperature)
  return Learner(init, learn)


def _init(
  policy, critic, optimizer, init_temperature, actor_key, critic_key
) -> tuple[base.TrainState, base.TrainState, base.Params]:
  """Actor, critics and their target before the first update."""
  actor = {
    'policy': policy.init(actor_key),
    'log_temperature': jnp.log(jnp.full((), init_temperature, float)),
  }
  critics = critic.init(critic_key)
  return (
    train_step.init(actor, optimizer),
    train_step.init(critics, optimizer),
    critics,
  )


def critic_updater(
  loss: Callable, update: Callable, num_updates: int, tau: float
) -> Callable:
  """Returns one update of the critics, a body of `Repeat`.

  Args:
    loss: that of `critic_objective`.
    update: `train_state, gradient -> train_state, info`.
    num_updates: minibatches of a sample.
    tau: τ of the Polyak average.
  """
  take = stages.Stage(
    functools.partial(minibatch, num_updates, 0),
    'critic_minibatch',
    'slice',
    unbatched=(0,),
  )
  gradient = stages.Stage(
    train_step.gradient(loss),
    'critic_gradient',
    'sum',
    unbatched=(0, 1, 2, 3, 4, 5),
  )
  apply = stages.Stage(
    functools.partial(_update_critics, update, tau), 'critic_update', 'batch'
  )

  def update_critics(critics: Critics, actor, stats, warm, sample, key):
    (batch,) = take(critics.round, sample)
    grads = gradient(
      critics.critic.params,
      critics.target,
      actor,
      stats,
      key,
      critics.round,
      batch,
    )
    return apply(critics, grads, warm), None

  return update_critics


def actor_updater(
  loss: Callable, update: Callable, num_updates: int
) -> Callable:
  """Returns an update of actor and temperature; arguments as for the critics.

  It takes the minibatch of the critics' last update, whose round is over.
  """
  take = stages.Stage(
    functools.partial(minibatch, num_updates, 1),
    'actor_minibatch',
    'slice',
    unbatched=(0,),
  )
  gradient = stages.Stage(
    train_step.gradient(loss), 'gradient', 'sum', unbatched=(0, 1, 2)
  )
  apply = stages.Stage(
    functools.partial(_update_actor, update), 'apply', 'batch'
  )

  def update_actor(actor, info, critics: Critics, stats, warm, sample):
    (batch,) = take(critics.round, sample)
    grads = gradient(actor.params, critics.critic.params, stats, batch)
    return apply(actor, info, grads, warm)

  return update_actor


def _first_info(update_both, actor, critic, target, *given):
  """Round zero, and zero metrics in the shapes that updates give them."""
  critics = Critics(critic, target, jnp.zeros((), jnp.int32), {})
  carry = critics, actor, {}
  (after, _, info), _ = jax.eval_shape(update_both, carry, *given)
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  return critics.round, *jax.tree.map(zeros, (after.info, info))


def minibatch(num_minibatches: int, rounds_ago: int, round_, rows):
  """The minibatch of a round, of so many equal runs of rows; as a tuple."""
  M = jax.tree.leaves(rows)[0].shape[0] // num_minibatches
  start = (round_ - rounds_ago) * M
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, start, M)
  return (jax.tree.map(take, rows),)


def _update_critics(update, tau, critics: Critics, gradient, warm) -> Critics:
  """An update of the critics and of their average.

  θ̄ ← τ θ + (1 − τ) θ̄
  """
  critic, info = update(critics.critic, gradient)
  target = optax.incremental_update(critic.params, critics.target, tau)
  info.pop('train/lr', None)  # Reported by the actor.
  for name in ('grad_norm', 'skipped'):
    info[f'train/critic_{name}'] = info.pop(f'train/{name}')
  critic, target = _keep_if(
    warm, (critics.critic, critics.target), (critic, target)
  )
  return Critics(critic, target, critics.round + 1, _add(critics.info, info))


def _update_actor(update, actor: base.TrainState, info, gradient, warm):
  """An update of the actor and of the temperature."""
  new, new_info = update(actor, gradient)
  return _keep_if(warm, actor, new), _add(info, new_info)


def _keep_if(keep, old, new):
  return jax.tree.map(lambda x, y: jnp.where(keep, x, y), old, new)


def _add(before: base.Info, info: base.Info) -> base.Info:
  return metrics.merge(before, info) if before else info


def critic_objective(
  policy: base.Policy,
  critic: critics_lib.Critic,
  critic_subset: int | None,
) -> Callable:
  """Returns the critics' loss, arXiv:1812.05905 eq. 5.

    J = Σᵢ ½ (Qᵢ(s, a) − y)²,   y = r + γ (minᵢ Q̄ᵢ(s′, a′) − α log π(a′|s′))

  The minimum is over all critics, or over a random subset of them for each
  minibatch (arXiv:2101.05982, algorithm 1).
  """

  def loss(params, target, actor, stats, key, round_, batch: replay.Sample):
    row = batch.row
    obs = obs_stats.normalize(stats, row.obs)
    next_obs = obs_stats.normalize(stats, row.next_obs)
    x = policy.act(actor['policy'], next_obs, _keys(batch.key, 0))
    q_IM = critic.value(target, next_obs, policy.to_env_action(x.action))
    if critic_subset is not None and critic_subset > len(q_IM):
      raise ValueError(
        f'critic_subset = {critic_subset} critics cannot be drawn from '
        f'{len(q_IM)}: lower it, or set num_critics of the critic.'
      )
    key = jax.random.fold_in(jax.random.fold_in(key, core.CHOOSE), round_)
    chosen = jax.random.permutation(key, q_IM.shape[0])[:critic_subset]
    soft_M = q_IM[chosen].min(0) - jnp.exp(actor['log_temperature']) * x.logp
    target_M = row.reward + row.discount * soft_M
    value_IM = critic.value(params, obs, row.env_action)
    error_IM = value_IM - jax.lax.stop_gradient(target_M)[None]
    loss_M = 0.5 * (error_IM**2).sum(0)
    info = {
      'train/value_loss': metrics.mean(loss_M),
      'train/q_value': metrics.mean(value_IM),
    }
    return (metrics.mean(loss_M),), info

  return loss


def actor_objective(
  policy: base.Policy,
  critic: critics_lib.Critic,
  critic_subset: int | None,
  target_entropy: float,
) -> Callable:
  """Returns the loss of actor and temperature, arXiv:1812.05905 eq. 9 and 18.

    J = α log π(a|s) − minᵢ Qᵢ(s, a)  −  α (log π(a|s) + H)

  α is constant in the first two terms, and log π in the last. With a
  `critic_subset`, the mean of all critics is maximized instead of the minimum
  (arXiv:2302.02348).
  """

  def loss(params, critics, stats, batch: replay.Sample):
    obs = obs_stats.normalize(stats, batch.row.obs)
    x = policy.act(params['policy'], obs, _keys(batch.key, 1))
    q_IM = critic.value(critics, obs, policy.to_env_action(x.action))
    q_M = q_IM.min(0) if critic_subset is None else q_IM.mean(0)
    alpha, fixed = jnp.exp(params['log_temperature']), jax.lax.stop_gradient
    policy_loss_M = fixed(alpha) * x.logp - q_M
    temperature_loss_M = -alpha * fixed(x.logp + target_entropy)
    info = {
      'train/policy_loss': metrics.mean(policy_loss_M),
      'train/entropy': metrics.mean(-x.logp),
      'train/temperature': metrics.mean(jnp.full_like(x.logp, alpha)),
    }
    return (metrics.mean(policy_loss_M + temperature_loss_M),), info

  return loss


def _keys(key_M, purpose: int):
  return jax.vmap(jax.random.fold_in, (0, None))(key_M, purpose)
