"""Soft actor-critic's equations: subsets by pairs, gradients by torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_envs
from jax_envs import HIGH, LOW
from stages import core
from stages.envs import replay
from stages.envs.rollouts import obs_stats
from stages.learn import soft_actor_critic, train_step
from stages.models.control import critics as critics_lib
from stages.models.control import gaussian_policy

KEY = jax.random.key(0)
GAMMA = 0.9


def test_the_least_is_of_a_pair_that_is_drawn_for_each_update():
  """Averages of five critics say 0 to 4, and critics 0: a loss is ½ · 5 y²."""
  five = critics_lib.Critic(
    lambda key: (),
    lambda params, obs, command: (
      params * jnp.arange(5.0)[:, None] * jnp.ones((1, len(obs)))
    ),
  )
  loss = jax.jit(
    soft_actor_critic.critic_objective(jax_envs.IdlePolicy, five, 2)
  )
  zero = jnp.zeros((3, 1))
  row = replay.Transition(zero, zero, zero[:, 0], zero[:, 0] + 1.0, zero)
  batch = replay.Sample(row, jax.random.split(KEY, 3))
  actor = {'policy': (), 'log_temperature': -jnp.inf}  # α = 0.
  key, least = jax.random.fold_in(KEY, core.CHOOSE), []
  for i in range(40):
    (mean,), _ = loss(0.0, 1.0, actor, (), KEY, i, batch)
    pair = jax.random.permutation(jax.random.fold_in(key, i), 5)[:2]
    least.append(int(pair.min()))
    y = (float(mean.sum / mean.count) / 2.5) ** 0.5
    assert y == pytest.approx(least[-1], abs=1e-6)
  assert {*least} == {0, 1, 2, 3}


def test_more_critics_than_there_are_cannot_be_drawn():
  two = critics_lib.Critic(
    lambda key: 1.0, lambda params, obs, action: jnp.zeros((2, len(obs)))
  )
  loss = soft_actor_critic.critic_objective(jax_envs.IdlePolicy, two, 3)
  zero = jnp.zeros((4, 1))
  row = replay.Transition(zero, zero, zero[:, 0], zero[:, 0], zero)
  batch = replay.Sample(row, jax.random.split(KEY, 4))
  actor = {'policy': (), 'log_temperature': 0.0}
  with pytest.raises(
    ValueError, match='critic_subset = 3 critics cannot be drawn from 2'
  ):
    loss(0.0, 1.0, actor, (), KEY, 0, batch)


# Losses and gradients.


def torch_sac(params, target, actor, scale, batch, noise, *, case):
  """One update's losses and gradients, written anew in torch."""
  import torch

  as_torch = lambda y: torch.tensor(np.array(y), dtype=torch.float64)
  leaf = lambda y: as_torch(y).requires_grad_()
  critics, actor = jax.tree.map(leaf, (params, actor))
  target = jax.tree.map(as_torch, target)
  row = jax.tree.map(as_torch, batch.row)
  deviation = torch.sqrt(as_torch(scale.square) / float(scale.count) + 1e-8)
  seen = lambda x: ((x - as_torch(scale.mean)) / deviation).clamp(-10, 10)
  low, high = torch.tensor(LOW), torch.tensor(HIGH)

  def act(obs, noise):
    p = actor['policy']['actor']
    x = torch.tanh(obs @ p['enter_OD'] + p['enter_bias_D'])
    x = torch.tanh(x @ p['up_DF'] + p['up_bias_F'])
    mean = x @ p['out_FA'] + p['out_bias_A']
    spread = x @ p['spread_FA'] + p['spread_bias_A']
    base_ = torch.distributions.Normal(mean, spread.clamp(-10, 2).exp())
    drawn = mean + base_.scale * noise
    inside = torch.tanh(drawn)
    slope = torch.log((1 - inside**2) * (high - low) / 2)
    command = (low + high) / 2 + (high - low) / 2 * inside
    return command, (base_.log_prob(drawn) - slope).sum(-1)

  def value(p, obs, command):
    inside = (2 * command - low - high) / (high - low)
    values = []
    for i in range(case['critics']):
      x = obs @ p['see_IOD'][i] + inside @ p['do_IAD'][i]
      x = x + p['enter_bias_ID'][i]
      if case['norm']:
        x = torch.nn.functional.layer_norm(
          x,
          x.shape[-1:],
          p['enter_scale_ID'][i],
          p['enter_shift_ID'][i],
          eps=1e-6,
        )
      x = torch.relu(x) @ p['up_IDF'][i] + p['up_bias_IF'][i]
      if case['norm']:
        x = torch.nn.functional.layer_norm(
          x,
          x.shape[-1:],
          p['up_scale_IF'][i],
          p['up_shift_IF'][i],
          eps=1e-6,
        )
      values.append(torch.relu(x) @ p['out_IF'][i] + p['out_bias_I'][i])
    return torch.stack(values)

  obs, after = seen(row.obs), seen(row.next_obs)
  alpha = actor['log_temperature'].exp()
  with torch.no_grad():
    command, logp = act(after, as_torch(noise[0]))
    q = value(target, after, command)[case['chosen']].min(0).values
    aim = row.reward + row.discount * (q - alpha * logp)
  error = value(critics, obs, row.env_action) - aim
  critic_loss = 0.5 * (error**2).sum(0).mean()
  critic_loss.backward()
  critic_grads = jax.tree.map(lambda y: y.grad.numpy(), critics)
  command, logp = act(obs, as_torch(noise[1]))
  q = value(jax.tree.map(as_torch, params), obs, command)
  q = q.mean(0) if case['subset'] else q.min(0).values
  loss = (alpha.detach() * logp - q).mean()
  loss = loss - alpha * (logp.detach().mean() + case['entropy'])
  loss.backward()
  actor_grads = jax.tree.map(lambda y: y.grad.numpy(), actor)
  return (critic_loss.item(), critic_grads), (loss.item(), actor_grads)


CASES = {
  'two critics': {},
  'ten critics, normalized layers, the least of two': {
    'critics': 10,
    'norm': True,
    'subset': 2,
  },
}


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_losses_and_gradients_are_those_of_torch(in_float64, case):
  pytest.importorskip('torch', reason='The reference is written in torch.')
  case = {'critics': 2, 'norm': False, 'subset': None, 'entropy': -1.3} | case
  env = jax_envs.push_in_bounds()
  policy = gaussian_policy.policy(
    env, width=8, bounding='tanh', state_dependent_std=True, critic=False
  )
  critic = critics_lib.ensemble(
    env, num_critics=case['critics'], width=8, layer_norm=case['norm']
  )
  params, target = (critic.init(jax.random.key(i)) for i in range(2))
  moved = lambda x: x + 0.1 * jax.random.normal(KEY, x.shape)
  actor = jax.tree.map(
    moved, {'policy': policy.init(KEY), 'log_temperature': jnp.log(0.3)}
  )
  params, target = jax.tree.map(moved, (params, target))
  M = 24
  obs, after = jax.random.normal(jax.random.key(7), (2, M, 10))
  rng = np.random.default_rng(0)
  row = replay.Transition(
    obs,
    jnp.asarray(rng.uniform(LOW, HIGH, (M, 2))),
    jnp.asarray(rng.normal(size=M)),
    jnp.asarray(GAMMA * (rng.random(M) < 0.8)),
    after,
  )
  batch = replay.Sample(row, jax.random.split(KEY, M))
  scale = obs_stats.from_batch(3.0 + 2.0 * obs, env.obs_spec)
  noise = [
    jax.vmap(lambda key, i=i: jax.random.normal(jax.random.fold_in(key, i), 2))(
      batch.key
    )
    for i in range(2)
  ]
  key = jax.random.fold_in(jax.random.fold_in(KEY, core.CHOOSE), 3)
  chosen = np.arange(case['critics'])
  if case['subset']:
    chosen = np.array(jax.random.permutation(key, case['critics']))[:2]
  case |= {'chosen': chosen}
  want = torch_sac(params, target, actor, scale, batch, noise, case=case)
  expect = soft_actor_critic.critic_objective(policy, critic, case['subset'])
  climb = soft_actor_critic.actor_objective(
    policy, critic, case['subset'], case['entropy']
  )
  got = (
    (expect, (params, target, actor, scale, KEY, 3, batch)),
    (climb, (actor, params, scale, batch)),
  )
  for (loss, args), (number, grads) in zip(got, want, strict=True):
    gradient = jax.jit(train_step.gradient(loss))(*args)
    (numerator,), (denominator,) = gradient.numerators, gradient.denominators
    (mean,), _ = jax.jit(loss)(*args)
    np.testing.assert_allclose(mean.sum / mean.count, number, rtol=1e-9)
    jax.tree.map(
      lambda a, b, d=denominator: np.testing.assert_allclose(
        a / d, b, rtol=1e-8, atol=1e-11
      ),
      numerator,
      grads,
    )
