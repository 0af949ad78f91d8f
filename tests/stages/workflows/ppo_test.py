"""PPO in environments: advantages by brute force, loss by torch, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
import jax_envs
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from stages import base, metrics, workflows
from stages.envs import action_chunks, episode_stats, push, reach
from stages.envs.rollouts import obs_stats
from stages.learn import loss_terms, optimizers, train_step
from stages.models.control import gaussian_policy
from stages.workflows.ppo import compute_advantages, objective
from tiny import read

KEY = jax.random.key(0)
GAMMA, LAMBDA = 0.9, 0.8


# Advantages.


class Critic:
  """The observation is a number, which is its own value."""

  @staticmethod
  def value(params, obs):
    del params
    return obs[..., 0]


def layouts(B=10_000, T=9, seed=0):
  """Random episodes, ended in either way at any step, in chunks of 1 to 3."""
  rng = np.random.default_rng(seed)
  often = rng.choice([0.0, 0.1, 0.5, 1.0], (B, 1))
  done = rng.random((B, T)) < often
  terminated = done & (rng.random((B, T)) < 0.5)
  truncated = done & ~terminated
  obs, final_obs, reward = rng.normal(size=(3, B, T))
  # Within an episode, what was seen last is what is seen next.
  goes_on = ~done[:, :-1]
  final_obs[:, :-1][goes_on] = obs[:, 1:][goes_on]
  timestep = base.TimeStep(
    (),
    reward,
    terminated.astype(float),
    truncated.astype(float),
    final_obs[..., None],
    np.zeros((B, T)),
    rng.integers(1, 4, (B, T)).astype(float),
  )
  none = np.zeros((B, T))
  return base.Experience(obs[..., None], none, none, none + 1, none), timestep


def brute_force(obs_T, timestep, always=False):
  """Aₜ of one row, episode by episode, as the double sum of its definition."""
  T, last = len(obs_T), timestep.final_obs[:, 0]
  done = (timestep.terminated + timestep.truncated) > 0
  advantage_T, begin = np.zeros(T), 0
  ends = [*np.flatnonzero(done), T - 1]
  for end in dict.fromkeys(ends):
    for t in range(begin, end + 1):
      weight = 1.0
      for k in range(t, end + 1):
        discount = GAMMA ** timestep.steps[k]
        after = last[k] if k == end else obs_T[k + 1]
        if timestep.terminated[k] and not always:
          after = 0.0
        delta = timestep.reward[k] + discount * after - obs_T[k]
        advantage_T[t] += weight * delta
        weight *= discount * LAMBDA
    begin = end + 1
  return advantage_T


@pytest.mark.slow
@pytest.mark.parametrize(
  'always, rows',
  claims.some(
    [(False, 10_000), (False, 500), (True, 500)],
    [
      (False, 500),
      (True, 500),
    ],
  ),
)
def test_advantages_are_those_of_each_episode_by_itself(
  in_float64, always, rows
):
  x, timestep = layouts(rows)
  done_BT = timestep.terminated + timestep.truncated
  assert (done_BT.sum(0) > 0).all()  # At every position.
  result = with_advantages(x, timestep, always)
  for i in range(len(done_BT)):
    row = jax.tree.map(lambda x, i=i: x[i], timestep)
    want_T = brute_force(x.obs[i, :, 0], row, always)
    np.testing.assert_allclose(result.advantage[i], want_T, atol=1e-12)
  np.testing.assert_allclose(
    result.return_, result.advantage + x.obs[..., 0], atol=1e-12
  )


def as_jax(tree):
  return jax.tree.map(jnp.asarray, tree)


def with_advantages(x, timestep, always=False):
  """Experience with the advantage and return of each step."""
  return x._replace(
    **compute_advantages(
      Critic, GAMMA, LAMBDA, always, None, (), *map(as_jax, (x, timestep))
    )
  )


def test_what_comes_after_an_episode_does_not_reach_into_it(in_float64):
  x, timestep = layouts(50)
  timestep.truncated[:, 4], timestep.terminated[:, 4] = 1.0, 0.0
  before = with_advantages(x, timestep).advantage[:, :5]
  x.obs[:, 5:] += 7.0
  timestep.reward[:, 5:] -= 3.0
  timestep.final_obs[:, 5:] *= 2.0
  np.testing.assert_array_equal(
    with_advantages(x, timestep).advantage[:, :5], before
  )


def test_a_step_that_a_simulator_lost_teaches_nothing(in_float64):
  x, timestep = layouts(50)
  ended_B = (timestep.terminated + timestep.truncated)[:, 3]
  assert 0 < ended_B.sum() < 50
  lost = np.zeros_like(timestep.reward)
  lost[:, 4] = timestep.truncated[:, 4] = 1.0
  timestep.terminated[:, 4] = 0.0
  timestep = timestep._replace(env_failed=lost)
  result = with_advantages(x, timestep)
  assert (result.mask == 1.0 - lost).all()
  assert (result.advantage[:, 4] == 0).all()
  # The step before is as if time had been up then.
  short = jax.tree.map(lambda y: y[:, :4], (x, timestep))
  short[1].truncated[:, 3] = 1.0 - short[1].terminated[:, 3]
  want = with_advantages(*short).advantage
  np.testing.assert_allclose(result.advantage[:, :4], want, atol=1e-12)


# Loss and gradient.


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
  (mean,), info, kl = jax.jit(loss)(params, scale, x)
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
  policy = Critic()
  policy.evaluate = lambda params, obs, action: base.Evaluation(
    jnp.zeros(2), jnp.zeros(2), params
  )
  zero, one = jnp.zeros(2), jnp.ones(2)
  x = base.Experience(
    zero[:, None], zero, zero, one, zero, advantage=zero, return_=zero
  )
  loss = objective(policy, value=loss_terms.ValueLoss(2.0, huber=1.0))
  # Errors of ½ and 3, the second linear beyond 1: ⅛ and 2½.
  (mean,), info, _ = loss(jnp.array([0.5, 3.0]), (), x)
  np.testing.assert_allclose(mean.sum, 2.0 * (0.125 + 2.5), rtol=1e-6)
  np.testing.assert_allclose(info['train/value_loss'].sum, 2.625, rtol=1e-6)
  with pytest.raises(ValueError, match='value_clip or value_huber, not both'):
    objective(policy, value=loss_terms.ValueLoss(0.5, 0.2, 1.0))


# Workflow.


@functools.cache
def ppo(env=None, **kwargs):
  settings = {
    'num_envs': 8,
    'num_steps': 6,
    'num_minibatches': 2,
    'num_epochs': 2,
  } | kwargs
  return workflows.ppo(
    env or push.push(horizon=5),
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(settings.pop('rate', 1e-3)),
    **settings,
  )


def test_a_first_update_is_on_policy():
  workflow = ppo(num_minibatches=1, num_epochs=1)
  _, info = workflow.step(workflow.init(KEY), (), KEY)
  numbers = read(info)
  np.testing.assert_allclose(numbers['train/ratio_mean'], 1.0, atol=1e-5)
  assert numbers['train/clip_fraction'] == 0
  assert abs(numbers['train/policy_loss']) < 1e-5  # Whitened advantages.


def test_advantages_may_be_left_unwhitened():
  workflow = ppo(
    num_minibatches=1, num_epochs=1, normalize_advantages=False, discount=0.0
  )
  state = workflow.init(KEY)
  params = state.actor.params
  params |= {'critic': jax.tree.map(jnp.zeros_like, params['critic'])}
  state = state._replace(actor=state.actor._replace(params=params))
  _, info = workflow.step(state, (), KEY)
  numbers = read(info)  # Values are zero.
  want = -numbers['rollout/reward_mean']
  assert want < -0.01
  np.testing.assert_allclose(numbers['train/policy_loss'], want, rtol=1e-5)


def test_episodes_continue_over_steps():
  workflow = ppo(num_steps=3)
  state = workflow.init(KEY)
  times = []
  for i in range(4):
    state, _ = workflow.step(state, (), jax.random.fold_in(KEY, i))
    times.append(
      (int(state.env_state.episode[0]), int(state.env_state.time[0]))
    )
  assert times == [(0, 3), (1, 1), (1, 4), (2, 2)]


def test_observation_statistics_are_updated_after_learning():
  workflow = ppo()
  state = workflow.init(KEY)
  assert state.obs_stats.count == 0
  after, _ = workflow.step(state, (), KEY)
  assert after.obs_stats.count == 48
  assert ppo(normalize_obs=False).init(KEY).obs_stats == ()


@pytest.mark.slow
def test_no_update_follows_beyond_the_target_kl():
  state = ppo().init(KEY)
  steps = {}
  for stop in (None, 0.0, 1e9):
    after, info = ppo(target_kl=stop, rate=0.1).step(state, (), KEY)
    stopped = read(info).get('train/stopped', 0.0)  # None never stops.
    steps[stop] = int(after.actor.step), stopped
  assert steps[None] == steps[1e9] == (4, 0.0)
  # The first minibatch is on policy; from the second on, KL is above zero.
  assert steps[0.0][0] in (0, 1) and steps[0.0][1] >= 0.75


def test_a_stopped_update_changes_no_bit_of_parameters_and_moments():
  state = ppo().init(KEY)
  stopped, _ = ppo(target_kl=-1.0).step(state, (), KEY)
  jax.tree.map(np.testing.assert_array_equal, stopped.actor, state.actor)


@pytest.mark.slow
def test_a_chunk_counts_the_steps_that_were_made_of_it():
  env = action_chunks.chunked(push.push(horizon=5), 3, 0.9)
  workflow = workflows.ppo(
    env,
    functools.partial(gaussian_policy.policy, width=8, chunk=3),
    optimizers.adamw(1e-3),
    num_envs=8,
    num_steps=2,
    num_minibatches=1,
    num_epochs=1,
  )
  state, info = workflow.step(workflow.init(KEY), (), KEY)
  numbers = read(info)
  assert numbers['env/episode_length'] == 5
  assert numbers['env/steps'] == 8 * 5  # Not 6: an episode ends after 5.
  np.testing.assert_allclose(numbers['train/ratio_mean'], 1.0, atol=1e-5)
  assert state.actor.params['actor']['out_FA'].shape == (8, 6)


# Episodes.


def timestep_of(reward, done, success, **kwargs):
  reward, done, success = (
    jnp.asarray([x], float) for x in (reward, done, success)
  )
  return base.TimeStep((), reward, 0 * done, done, (), success, **kwargs)


def test_episodes_are_counted_when_they_end_however_batches_are_cut():
  reward = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
  done = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
  success = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
  whole = timestep_of(reward, done, success)
  open_, ended = episode_stats.update(episode_stats.init(1), whole)
  assert [float(x[0]) for x in ended] == [2.0, 15.0, 5.0, 2.0, 1.0]
  assert [float(x[0]) for x in open_] == [6.0, 1.0, 0.0]
  for at in range(1, 6):
    one, first = episode_stats.update(
      episode_stats.init(1), jax.tree.map(lambda x, at=at: x[:, :at], whole)
    )
    two, second = episode_stats.update(
      one, jax.tree.map(lambda x, at=at: x[:, at:], whole)
    )
    both = jax.tree.map(jnp.add, first, second)
    jax.tree.map(np.testing.assert_array_equal, (two, both), (open_, ended))


def test_an_episode_whose_simulator_failed_is_not_counted():
  lost = jnp.array([[0.0, 1.0, 0.0, 0.0]])
  timestep = timestep_of([1.0] * 4, [0, 1, 0, 1], [1, 0, 0, 0], env_failed=lost)
  open_, ended = episode_stats.update(episode_stats.init(1), timestep)
  assert [float(x[0]) for x in ended] == [1.0, 2.0, 2.0, 0.0, 0.0]
  assert float(episode_stats.first_episode(timestep).count[0]) == 0


def test_first_episode_stats_ignore_later_episodes():
  timestep = timestep_of([1.0, 2, 4, 8], [0, 1, 0, 1], [1, 0, 1, 1])
  first = episode_stats.first_episode(timestep)
  assert [float(x[0]) for x in first] == [1.0, 3.0, 2.0, 1.0, 0.0]
  endless = timestep_of([1.0, 2, 4, 8], [0, 0, 0, 0], [0, 0, 0, 1])
  assert [float(x[0]) for x in episode_stats.first_episode(endless)] == [
    1,
    15,
    4,
    1,
    1,
  ]


@pytest.mark.slow
def test_without_a_finished_episode_there_are_no_episode_metrics():
  workflow = ppo(push.push(horizon=50))
  _, info = workflow.step(workflow.init(KEY), (), KEY)
  assert not any(name.startswith('env/success') for name in read(info))


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


# A simulator.


@pytest.mark.slow
def test_a_host_simulator_gives_the_metrics_of_the_same_env_in_jax():
  env = push.push(horizon=5)
  hosted = ppo(jax_envs.on_host(env), eval_env=jax_envs.on_host(env))
  states = jax_envs.assert_same_metrics(ppo(env), hosted, KEY, num_seeds=4)
  np.testing.assert_allclose(states[1].obs, states[0].obs, atol=1e-4)
  assert (np.asarray(states[1].env_state)[:, 1] == 12).all()


@pytest.mark.slow
def test_half_of_a_simulator_may_be_stepped_while_the_other_is_acted_on():
  env = push.push(horizon=5)
  plain = ppo(env)
  hosted = ppo(jax_envs.on_host(env))
  state, start = plain.init(KEY), hosted.init(KEY)
  step = flow_lib.trace(hosted.step, start, (), KEY)
  sketch = {
    'places': {'policy': {'devices': [0]}, 'simulator': {'devices': [1]}},
    'stages': {'simulate': 'simulator', '*': 'policy'},
    'pieces': 2,
  }
  runtime = local.LocalRuntime(plan_lib.parse(sketch, step.stages), step=step)
  runtime.load(start)
  for i in range(2):
    key = jax.random.fold_in(KEY, i)
    got = read(runtime.step((), key))
    state, info = plain.step(state, (), key)
    for name, number in read(info).items():
      np.testing.assert_allclose(
        got[name], number, rtol=1e-3, atol=1e-4, err_msg=name
      )
  runs = [s for s in runtime.timeline.take() if s.what == 'run']
  assert {s.piece for s in runs if s.stage == 'simulate'} == {(1, 2), (2, 2)}
  runtime.close()


# Learning.


def learn(env, steps):
  """Evaluations before and after learning."""
  workflow = workflows.ppo(
    env,
    functools.partial(gaussian_policy.policy, width=32),
    optimizers.adamw(2e-3, clip_norm=0.5),
    num_envs=128,
    num_steps=32,
    discount=0.95,
    gae_lambda=0.9,
    num_minibatches=4,
    num_epochs=4,
    target_kl=0.05,
  )
  seed = np.arange(100, dtype=np.int32)
  state = workflow.init(KEY)
  before = read(workflow.evaluate(state, seed, KEY))
  for i in range(steps):
    state, _ = workflow.step(state, (), jax.random.fold_in(KEY, i))
  return before, read(workflow.evaluate(state, seed, KEY))


@pytest.mark.slow
def test_ppo_learns_to_reach_and_not_from_rewards_of_chance():
  before, after = learn(reach.reach(), 60)
  _, control = learn(jax_envs.with_random_reward(reach.reach()), 60)
  assert before['eval/success_at_end'] < 0.1
  assert after['eval/success_at_end'] > 0.5
  assert control['eval/success_at_end'] < 0.2


@pytest.mark.claims
@pytest.mark.slow
def test_ppo_learns_to_push_and_not_from_rewards_of_chance():
  _, after = learn(push.push(), 120)
  _, control = learn(jax_envs.with_random_reward(push.push()), 120)
  assert after['eval/success_at_end'] > 0.8
  assert control['eval/success_once'] < 0.2
