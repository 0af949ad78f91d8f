"""Soft actor-critic: what is made smaller, arXiv:1812.05905, and by what steps.

With layers that are normalized, several critics and a subset of them, it is
what RLPD learns by, arXiv:2302.02348.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, core, metrics, repeat
from stages.envs import obs_stats, replay
from stages.learn import train_step


class Critics(NamedTuple):
  """What the updates of critics in a step go on from.

  Attributes:
    critic: they themselves.
    target: an average of what they were.
    round: updates of this step so far.
    info: what those had to tell.
  """

  critic: base.TrainState
  target: base.Params
  round: jax.Array
  info: base.Info


def learner(parts, n, delay, polyak, subset, entropy) -> Callable:
  """Returns `actor, (critic, target), stats, warm, sample, key -> the same`.

  What it returns are the first two, and info.

  Args:
    parts: policy, critic and optimizer.
    n: updates of the critics.
    delay: of them, those for one of the actor.
    polyak: as in `sac`.
    subset: as in `sac`.
    entropy: as in `sac`.
  """
  policy, critic, optimizer = parts
  expect = critic_objective(policy, critic, subset)
  climb = actor_objective(policy, critic, subset, entropy)
  make = train_step.apply(optimizer)
  take, again = (
    stages.Stage(functools.partial(minibatch, n, ago), name, 'slice', (0,))
    for ago, name in ((0, 'critic_minibatch'), (1, 'actor_minibatch'))
  )
  criticise = stages.Stage(
    train_step.gradient(expect),
    'critic_gradient',
    'sum',
    unbatched=(0, 1, 2, 3, 4, 5),
  )
  improve = stages.Stage(
    functools.partial(_improve, make, polyak), 'critic_update', 'batch'
  )
  gradient = stages.Stage(
    train_step.gradient(climb), 'gradient', 'sum', unbatched=(0, 1, 2)
  )
  apply = stages.Stage(functools.partial(_apply, make), 'apply', 'batch')

  def one(now: Critics, actor, stats, warm, sample, key):
    """An update of the critics."""
    (batch,) = take(now.round, sample)
    made = criticise(
      *(now.critic.params, now.target, actor, stats, key, now.round), batch
    )
    return improve(now, made, warm), None

  several = repeat.Repeat(one, 'critic_updates', delay)

  def update(carry, stats, warm, sample, key):
    """Some of the critics, and one of the actor."""
    now, actor, info = carry
    now = several(now, actor.params, stats, warm, sample, key)
    (batch,) = again(now.round, sample)
    made = gradient(actor.params, now.critic.params, stats, batch)
    return (now, *apply(actor, info, made, warm)), None

  @stages.stage('first_info', 'batch')
  def start(actor, critic, target, *given):
    """No update yet, and nothing told, in the shape of what will be."""
    now = Critics(critic, target, jnp.zeros((), jnp.int32), {})
    (told, _, info), _ = jax.eval_shape(update, (now, actor, {}), *given)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    return now.round, *jax.tree.map(zeros, (told.info, info))

  loop = repeat.Repeat(update, 'updates', n // delay)

  def learn(actor, critics, *given):
    round_, told, info = start(actor, *critics, *given)
    carry = Critics(*critics, round_, told), actor, info
    now, actor, info = loop(carry, *given)
    return actor, (now.critic, now.target), now.info | info

  return learn


def minibatch(n, ago, round_, rows):
  """That of a round: of `n` that are equal runs of rows."""
  M = jax.tree.leaves(rows)[0].shape[0] // n
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, (round_ - ago) * M, M)
  return (jax.tree.map(take, rows),)


def _improve(make, polyak, now: Critics, gradient, warm) -> Critics:
  """An update of the critics, and of what they are on average.

  θ̄ ← τ θ + (1 − τ) θ̄
  """
  critic, info = make(now.critic, gradient)
  target = optax.incremental_update(critic.params, now.target, polyak)
  info.pop('train/lr', None)  # The actor's.
  for name in ('grad_norm', 'skipped'):
    info[f'train/critic_{name}'] = info.pop(f'train/{name}')
  critic, target = _unless(warm, (critic, target), (now.critic, now.target))
  return Critics(critic, target, now.round + 1, _told(now.info, info))


def _apply(make, actor: base.TrainState, info, gradient, warm):
  """An update of the actor and of the temperature."""
  new, told = make(actor, gradient)
  return _unless(warm, new, actor), _told(info, told)


def _unless(warm, new, old):
  return jax.tree.map(lambda a, b: jnp.where(warm, b, a), new, old)


def _told(before: base.Info, info: base.Info) -> base.Info:
  return metrics.merge(before, info) if before else info


def critic_objective(policy, critic, subset) -> Callable:
  """What critics minimize, arXiv:1812.05905 eq. 5; returns a loss.

    J = Σᵢ ½ (Qᵢ(s, a) − y)²,   y = r + γ (minᵢ Q̄ᵢ(s′, a′) − α log π(a′|s′))

  The least is of all critics, or of a subset of them that is drawn for the
  minibatch (arXiv:2101.05982, algorithm 1).
  """

  def loss(params, target, actor, stats, key, round_, batch: replay.Sample):
    row = batch.row
    obs, after = (
      obs_stats.normalize(stats, x) for x in (row.obs, row.next_obs)
    )
    x = policy.act(actor['policy'], after, _luck(batch.key, 0))
    q_IM = critic.value(target, after, policy.to_env_action(x.action))
    luck = jax.random.fold_in(jax.random.fold_in(key, core.CHOOSE), round_)
    chosen = jax.random.permutation(luck, q_IM.shape[0])[:subset]
    soft_M = q_IM[chosen].min(0) - jnp.exp(actor['log_temperature']) * x.logp
    aim_M = row.reward + row.discount * soft_M
    value_IM = critic.value(params, obs, row.env_action)
    error_IM = value_IM - jax.lax.stop_gradient(aim_M)[None]
    loss_M = 0.5 * (error_IM**2).sum(0)
    info = {
      'train/value_loss': metrics.mean(loss_M),
      'train/q_value': metrics.mean(value_IM),
    }
    return (metrics.mean(loss_M),), info

  return loss


def actor_objective(policy, critic, subset, entropy) -> Callable:
  """What the actor minimizes, arXiv:1812.05905 eq. 9 and 18; returns a loss.

    J = α log π(a|s) − minᵢ Qᵢ(s, a)  −  α (log π(a|s) + H)

  In the first two terms α is a number, and in the last log π. Where targets are
  of a subset of the critics, the mean of all is climbed (arXiv:2302.02348).
  """

  def loss(params, critics, stats, batch: replay.Sample):
    obs = obs_stats.normalize(stats, batch.row.obs)
    x = policy.act(params['policy'], obs, _luck(batch.key, 1))
    q_IM = critic.value(critics, obs, policy.to_env_action(x.action))
    q_M = q_IM.min(0) if subset is None else q_IM.mean(0)
    alpha, fixed = jnp.exp(params['log_temperature']), jax.lax.stop_gradient
    policy_loss_M = fixed(alpha) * x.logp - q_M
    temperature_loss_M = -alpha * fixed(x.logp + entropy)
    info = {
      'train/policy_loss': metrics.mean(policy_loss_M),
      'train/entropy': metrics.mean(-x.logp),
      'train/temperature': metrics.mean(jnp.full_like(x.logp, alpha)),
    }
    return (metrics.mean(policy_loss_M + temperature_loss_M),), info

  return loss


def _luck(key_M, purpose: int):
  return jax.vmap(jax.random.fold_in, (0, None))(key_M, purpose)
