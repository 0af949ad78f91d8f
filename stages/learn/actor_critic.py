"""Updates of a policy and of a value model, on one trunk or on two.

Two trunks have a gradient and an optimizer each, so that a plan may give each
model a place of its own. On one trunk, both losses have one gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from sharding import rules
from stages import base
from stages.learn import optimizers, train_step


class Learner(NamedTuple):
  """Functions that initialize and update an actor and its critic.

  Attributes:
    init: `key -> actor, critic`: two train states; of the critic, `()` if it is
      a head on the trunk of the actor.
    critic_params: `state -> params` that `ValueModel.value` takes; the state
      has the fields `actor` and `critic`.
    update: `state, minibatches -> {'actor': …, 'critic': …}, info`.
  """

  init: Callable[[base.Key], tuple[base.TrainState, Any]]
  critic_params: Callable[[Any], base.Params]
  update: Callable[..., Any]


def learner(
  policy_and_optimizer,
  critic_and_optimizer,
  losses: tuple[Callable, Callable],
  *,
  aggregate: Callable,
  warmup: tuple[int, int],
  group_size: int,
) -> Learner:
  """Updates of a policy and of its critic, on one trunk or on two.

  Args:
    policy_and_optimizer: a `base.Policy` and its optimizer.
    critic_and_optimizer: a `value_model.ValueModel` and its optimizer.
    losses: of the policy, `critic_loss=None -> loss` as `objectives.policy`,
      which adds that of the critic; of the critic, `value_BT, experience ->
      loss_BT, info`.
    aggregate: `loss_BT, mask_BT -> metrics.Mean` of the critic's loss.
    warmup: first steps, in which only the critic learns, or only its head; and
      updates a step.
    group_size: adjacent rows that share a prompt.
  """
  critic, _ = critic_and_optimizer
  if critic.shares_trunk:
    return _one_learner(
      policy_and_optimizer, critic_and_optimizer, losses, warmup, group_size
    )
  return _two_learners(
    policy_and_optimizer,
    critic_and_optimizer,
    losses,
    aggregate,
    warmup,
    group_size,
  )


def _two_learners(
  policy_and_optimizer,
  critic_and_optimizer,
  losses,
  aggregate,
  warmup,
  group_size,
) -> Learner:
  """Updates of a policy and of a value model with a trunk of its own."""
  policy_objective, value_loss = losses
  (policy, optimizer), (critic, critic_optimizer) = (
    policy_and_optimizer,
    critic_and_optimizer,
  )
  optimizer = optimizers.delayed(optimizer, *warmup)

  def loss_of_critic(params, x: base.Experience):
    group = rules.local_group(group_size, x.action.shape[0])
    value_BT = critic.value(
      params, x.obs, x.action, group_size=group, mask=x.mask
    )
    loss_BT, info = value_loss(value_BT, x)
    mean = aggregate(loss_BT, x.mask)
    return train_step.Loss((mean,), info, count=x.mask.sum())

  groups = {'group_size': group_size, 'divisible_groups': True}
  learn_actor = train_step.learner(policy_objective(), optimizer, **groups)
  learn_critic = train_step.learner(
    loss_of_critic, critic_optimizer, **groups, prefix='critic_'
  )

  def init(key):
    actor_key, critic_key = jax.random.split(key)
    return (
      train_step.init(policy.init(actor_key), optimizer),
      train_step.init(critic.init(critic_key), critic_optimizer),
    )

  def update(state, batches):
    # Fields that the critic does not read are not sent to its place.
    unread = {'logp': (), 'advantage': (), 'reward': (), 'version': ()}
    unread |= {'proximal': None, 'routing': None}
    read = [(x._replace(**unread),) for x, _ in batches]
    critic, critic_info = learn_critic(state.critic, read)
    actor, info = learn_actor(state.actor, batches)
    return {'actor': actor, 'critic': critic}, info | _of_critic(critic_info)

  return Learner(init, lambda state: state.critic.params, update)


def _one_learner(
  policy_and_optimizer, critic_and_optimizer, losses, warmup, group_size
) -> Learner:
  """Updates of a policy with the critic's head on its trunk."""
  policy_objective, value_loss = losses
  (policy, optimizer), (critic, critic_optimizer) = (
    policy_and_optimizer,
    critic_and_optimizer,
  )
  optimizer = optimizers.actor_critic(
    optimizer,
    critic_optimizer,
    critic_warmup_steps=warmup[0],
    updates_per_step=warmup[1],
  )
  learn = train_step.learner(
    policy_objective(critic_loss=value_loss),
    optimizer,
    group_size=group_size,
    divisible_groups=True,
  )

  def init(key):
    actor_key, critic_key = jax.random.split(key)
    params = policy.init(actor_key) | {base.CRITIC: critic.init(critic_key)}
    return train_step.init(params, optimizer), ()

  def update(state, batches):
    actor, info = learn(state.actor, batches)
    return {'actor': actor, 'critic': state.critic}, info

  return Learner(init, lambda state: state.actor.params, update)


def _of_critic(info: base.Info) -> base.Info:
  """The critic's metrics, where an optimizer's have names of their own."""
  names = {'train/lr': 'train/lr_critic'} | {
    f'train/{x}': f'train/critic_{x}' for x in ('grad_norm', 'skipped')
  }
  return {names.get(name, name): x for name, x in info.items()}


def policy_version(actor: base.TrainState) -> base.Version:
  """The version of an actor that samples: without the critic's head."""
  return base.Version(policy_params(actor.params), actor.step)


def policy_params(params: base.Params) -> base.Params:
  """Parameters without the critic's head, if there is one."""
  return {name: x for name, x in params.items() if name != base.CRITIC}
