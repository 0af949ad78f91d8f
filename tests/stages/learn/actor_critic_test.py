"""Loss and gradient of an actor and its critic, by torch and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import base, metrics
from stages.envs import push
from stages.envs.rollouts import obs_stats
from stages.learn import loss_terms, train_step
from stages.models.control import gaussian_policy
from stages.workflows.embodied_ppo import objective
from tests.stages.learn import ppo_cases

KEY = jax.random.key(0)


def minibatch(policy, params, M=48, seed=0):
  """Steps of a policy that has moved since: ratios of about 0.5 to 2."""
  rng = np.random.default_rng(seed)
  obs = rng.normal(1.0, 2.0, (M, 10))
  action = rng.normal(size=(M, 2))
  now = policy.evaluate(params, jnp.asarray(obs), jnp.asarray(action))
  return base.Experience(
    obs=jnp.asarray(obs),
    action=jnp.asarray(action),
    logp=now.logp + rng.normal(0, 0.3, M),
    mask=jnp.asarray(rng.random(M) < 0.9, float),
    truncated=(),
    advantage=jnp.asarray(rng.normal(size=M)),
    value=now.value + rng.normal(0, 0.5, M),
    return_=now.value + rng.normal(0, 1.0, M),
  )


def torch_ppo(params, scale, x, *, clip, dual, weight, near, entropy, squash):
  """PPO's loss and gradient, written anew in torch; returns both."""
  import torch

  as_torch = lambda y: torch.tensor(np.array(y), dtype=torch.float64)
  p = jax.tree.map(lambda y: as_torch(y).requires_grad_(), params)
  obs = as_torch(x.obs)
  if scale:
    deviation = torch.sqrt(as_torch(scale.square) / float(scale.count) + 1e-8)
    obs = ((obs - as_torch(scale.mean)) / deviation).clamp(-10, 10)

  def hidden(p):
    first = torch.tanh(obs @ p['enter_OD'] + p['enter_bias_D'])
    return torch.tanh(first @ p['up_DF'] + p['up_bias_F'])

  actor, critic = p['actor'], p['critic']
  mean = hidden(actor) @ actor['out_FA'] + actor['out_bias_A']
  value = hidden(critic) @ critic['out_F'] + critic['out_bias']
  normal = torch.distributions.Normal(
    mean, p['actor']['log_std_A'].exp().expand_as(mean)
  )
  action = as_torch(x.action)
  logp, bonus = normal.log_prob(action).sum(-1), normal.entropy().sum(-1)
  if squash:  # The range is −1 … 1.
    logp = logp - torch.log(1 - torch.tanh(action) ** 2).sum(-1)
    bonus = bonus + torch.log(1 - torch.tanh(mean) ** 2).sum(-1)
  ratio, gain = torch.exp(logp - as_torch(x.logp)), as_torch(x.advantage)
  surrogate = torch.minimum(
    ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain
  )
  if dual:
    floor = torch.maximum(surrogate, dual * gain)
    surrogate = torch.where(gain < 0, floor, surrogate)
  old, aim = as_torch(x.value), as_torch(x.return_)
  error = (value - aim) ** 2
  if near:
    moved = old + (value - old).clamp(-near, near)
    error = torch.maximum(error, (moved - aim) ** 2)
  mask = as_torch(x.mask)
  each = -surrogate + weight * 0.5 * error - entropy * bonus
  total = (each * mask).sum() / mask.sum()
  total.backward()
  return total.item(), jax.tree.map(lambda y: y.grad.numpy(), p)


CASES = {
  'plain': {},
  'values clipped': {'near': 0.2},
  'clip-higher, dual clip, entropy': {
    'clip': (0.1, 0.3),
    'dual': 1.5,
    'entropy': 0.05,
  },
  'squashed': {'squash': True, 'entropy': 0.05},
}


# Loss and gradient.


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_torch(in_float64, case):
  pytest.importorskip('torch', reason='The reference is written in torch.')
  case = {
    'clip': (0.2, 0.2),
    'dual': None,
    'weight': 0.7,
    'near': None,
    'entropy': 0.0,
    'squash': False,
  } | case
  policy = gaussian_policy.policy(
    push.push(), width=16, bounding='tanh' if case['squash'] else 'clip'
  )
  params = policy.init(KEY)
  params = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(KEY, x.shape), params
  )
  x = minibatch(policy, params)
  scale = obs_stats.from_batch(x.obs, push.push().obs_spec)
  x = x._replace(
    logp=policy.evaluate(
      params, obs_stats.normalize(scale, x.obs), x.action
    ).logp
    + np.random.default_rng(1).normal(0, 0.3, len(x.mask))
  )
  loss = objective(
    policy,
    clip=loss_terms.Clip(*case['clip'], case['dual']),
    value=loss_terms.ValueLoss(case['weight'], case['near']),
    entropy_coef=case['entropy'],
  )
  gradient = jax.jit(train_step.gradient(loss))(params, scale, x)
  (numerator,), (denominator,) = gradient.numerators, gradient.denominators
  want, grads = torch_ppo(params, scale, x, **case)
  (mean,), info, kl, _ = jax.jit(loss)(params, scale, x)
  assert kl == info['train/kl_behavior']
  np.testing.assert_allclose(mean.sum / mean.count, want, rtol=1e-10)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a / denominator, b, rtol=1e-8, atol=1e-11
    ),
    numerator,
    grads,
  )
  clipped = metrics.read(info)[0]['train/clip_fraction']
  assert 0.1 < clipped < 0.9  # The clip is at work.


def test_the_critics_huber_loss_is_worked_by_hand():
  policy = ppo_cases.Critic()
  policy.evaluate = lambda params, obs, action: base.Evaluation(
    jnp.zeros(2), jnp.zeros(2), params
  )
  zero, one = jnp.zeros(2), jnp.ones(2)
  x = base.Experience(
    zero[:, None], zero, zero, one, zero, advantage=zero, return_=zero
  )
  loss = objective(policy, value=loss_terms.ValueLoss(2.0, huber=1.0))
  # Errors of ½ and 3, the second linear beyond 1: ⅛ and 2½.
  (mean,), info, *_ = loss(jnp.array([0.5, 3.0]), (), x)
  np.testing.assert_allclose(mean.sum, 2.0 * (0.125 + 2.5), rtol=1e-6)
  np.testing.assert_allclose(info['train/value_loss'].sum, 2.625, rtol=1e-6)
  with pytest.raises(ValueError, match='value_clip or value_huber, not both'):
    objective(policy, value=loss_terms.ValueLoss(0.5, 0.2, 1.0))


# Episodes.


def test_the_explained_share_of_a_variance_is_numpys():
  rng = np.random.default_rng(0)
  value, return_ = rng.normal(size=(2, 60)).astype(np.float32)
  return_ += value
  parts = [
    metrics.explained_variance(value[i::3], return_[i::3]) for i in range(3)
  ]
  merged = functools.reduce(metrics.merge, parts)
  want = 1 - np.var(return_ - value) / np.var(return_)
  np.testing.assert_allclose(merged.value()[''], want, rtol=1e-5)


def test_equal_returns_have_no_variance_to_explain():
  value = np.random.default_rng(0).normal(size=60).astype(np.float32)
  for return_ in 0.0, 1.0:
    # As of an advantage and a value: float32 rounds them apart.
    returns = (return_ - value) + value
    metric = metrics.explained_variance(value, returns)
    assert metrics.read({'train/explained_variance': metric})[0] == {}
