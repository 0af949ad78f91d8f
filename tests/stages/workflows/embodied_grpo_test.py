"""Embodied GRPO: groups, rewards, masks, its gradient by torch, learning."""

import functools

import jax
import numpy as np
import optax
import pytest

import jax_envs
import stages
from stages import workflows
from stages.envs import episode_stats, push
from stages.envs.rollouts import policy_file, rollout
from stages.envs.rollouts import rollout as rollout_lib
from stages.learn import optimizers
from stages.models.control import gaussian_policy
from stages.workflows.embodied_grpo import describe
from tests.stages.workflows import embodied_advantages_test
from tiny import read

KEY = jax.random.key(0)
GROUP = 4


# Advantages and masks, by hand.


def test_metrics_are_of_first_episodes_and_steps_that_did_not_fail():
  success = [[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
  lost = np.zeros((4, 4))
  lost[2, 0] = 1.0
  numbers = read(
    describe(
      2,
      episode_stats.success,
      embodied_advantages_test.timestep_of(
        embodied_advantages_test.ENDS, success, env_failed=lost
      ),
    )
  )
  assert numbers['env/success_once'] == pytest.approx(1 / 3)
  assert numbers['env/episode_length'] == 3.0
  assert numbers['rollout/reward_mean'] == pytest.approx(1 / 3)
  assert numbers['rollout/groups_degenerate'] == 0.5
  assert numbers['env/steps'] == 15


# A step.


@functools.cache
def grpo(env=None, optimizer=None, **kwargs):
  settings = {
    'num_envs': 16,
    'group_size': GROUP,
    'episode_reward': episode_stats.episode_return,
  } | kwargs
  return workflows.embodied_grpo(
    env or jax_envs.line(),
    functools.partial(gaussian_policy.policy, width=8),
    optimizer or optimizers.adamw(1e-3),
    **settings,
  )


def acted(env, state, key, group_size=GROUP, rows=16, T=5):
  """Experience and time steps of one step, stage by stage."""
  policy = gaussian_policy.policy(env, width=8)
  seed = rollout_lib.draw_seeds(rows // group_size, group_size)(key)
  env_state, obs = rollout.reset(env)(seed)
  act = rollout.rollout(policy, env, T)
  keys = stages.keys(key, seed)
  return act(state.actor.params, state.obs_stats, env_state, obs, keys)[2:]


def test_a_group_shares_its_initial_state_and_samples_different_actions():
  state = grpo().init(KEY)
  x, _ = acted(jax_envs.line(), state, KEY)
  start = np.asarray(x.obs)[:, 0, 1].reshape(-1, GROUP)
  assert (start == start[:, :1]).all()
  assert len({*start[:, 0]}) == 4
  assert len({*np.asarray(x.action)[:, 0, 0]}) == 16
  other, _ = acted(jax_envs.line(), state, jax.random.key(1))
  assert not {*np.asarray(other.obs)[:, 0, 1]} & {*start.ravel()}


def test_a_first_update_is_on_policy_and_follows_equations():
  state, info = grpo().step(grpo().init(KEY), (), KEY)
  numbers = read(info)
  np.testing.assert_allclose(numbers['train/ratio_mean'], 1.0, atol=1e-5)
  assert numbers['train/clip_fraction'] == 0
  assert numbers['env/steps'] == 16 * 5
  assert state.obs_stats.count == 80
  assert state.reference == ()


def test_rows_are_whole_groups():
  with pytest.raises(ValueError, match='10 environments cannot be split'):
    grpo(num_envs=10)


def test_episodes_of_a_group_are_of_one_task():
  tasks = {'tasks': ('near', 'far'), 'task': lambda state: 0 * state.seed}
  env = jax_envs.line()._replace(**tasks)
  with pytest.raises(ValueError, match='groups of 4, .* 2 tasks .* `group_si'):
    grpo(env)
  grpo(env._replace(task_group_size=2 * GROUP))


CLIP = {'clip_low': 0.04, 'clip_high': 0.07}


def torch_gradient(
  params, reference, scale, x, timestep, *, kl_coef, entropy_coef
):
  """The gradient of a batch, written anew in torch."""
  import torch

  as_torch = lambda y: torch.tensor(np.array(y), dtype=torch.float64)
  done = np.array(timestep.terminated + timestep.truncated) > 0
  B, T = done.shape
  mask, return_ = np.zeros((B, T)), np.zeros(B)
  for i in range(B):
    for t in range(T):
      mask[i, t] = 1
      return_[i] += timestep.reward[i, t]
      if done[i, t]:
        break
  groups = return_.reshape(-1, GROUP)
  centered = groups - groups.mean(1, keepdims=True)
  gain = centered / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
  gain, mask = as_torch(gain.reshape(-1, 1)), as_torch(mask)

  def normal(p, scale):
    obs = as_torch(x.obs)
    if float(scale.count):
      variance = as_torch(scale.square) / float(scale.count)
      obs = (obs - as_torch(scale.mean)) / torch.sqrt(variance + 1e-8)
      obs = obs.clamp(-10, 10)
    first = torch.tanh(obs @ p['enter_OD'] + p['enter_bias_D'])
    second = torch.tanh(first @ p['up_DF'] + p['up_bias_F'])
    mean = second @ p['out_FA'] + p['out_bias_A']
    deviation = p['log_std_A'].exp().expand_as(mean)
    return torch.distributions.Normal(mean, deviation)

  p = {k: as_torch(v).requires_grad_() for k, v in params['actor'].items()}
  now = normal(p, scale)
  action = as_torch(x.action)
  logp = now.log_prob(action).sum(-1)
  then = {k: as_torch(v) for k, v in reference[0]['actor'].items()}
  ahead = normal(then, reference[1]).log_prob(action).sum(-1) - logp
  ratio = torch.exp(logp - as_torch(x.logp))
  surrogate = torch.minimum(ratio * gain, ratio.clamp(0.96, 1.07) * gain)
  each = -surrogate + kl_coef * (torch.exp(ahead) - 1 - ahead)
  each = each - entropy_coef * now.entropy().sum(-1)
  ((each * mask).sum(1) / mask.sum(1)).mean().backward()
  clipped = ((ratio < 0.96) & (gain < 0) | (ratio > 1.07) & (gain > 0)) * mask
  share = (clipped.sum() / mask.sum()).item()
  return {k: v.grad.numpy() for k, v in p.items()}, share, mask


@pytest.mark.slow
def test_two_epochs_are_those_of_torch(in_float64):
  pytest.importorskip('torch', reason='The reference is written in torch.')
  rate, weights = 0.3, {'kl_coef': 0.3, 'entropy_coef': 0.02}
  sgd = optax.chain(optax.trace(decay=0.0), optax.scale(-rate))
  workflow = grpo(optimizer=sgd, num_epochs=2, **CLIP, **weights)
  begun = workflow.init(KEY)
  state, _ = workflow.step(
    begun, (), KEY
  )  # Observations are normalized from here on.
  key = jax.random.key(1)
  x, timestep = acted(jax_envs.line(), state, key)
  after, info = workflow.step(state, (), key)
  params = jax.device_get(state.actor.params)
  for _ in range(2):
    want, clipped, mask = torch_gradient(
      params, begun.reference, state.obs_stats, x, timestep, **weights
    )
    moved = {k: params['actor'][k] - rate * want[k] for k in want}
    params = params | {'actor': moved}
  assert mask.sum() < mask.numel()  # Some episodes have ended early.
  got = optax.tree.get(after.actor.opt_state, 'trace')['actor']
  for name, grad in want.items():
    np.testing.assert_allclose(got[name], grad, rtol=1e-8, atol=1e-11)
  # The mean of both epochs; nothing is clipped in the first.
  assert clipped > 0.05
  np.testing.assert_allclose(
    read(info)['train/clip_fraction'], clipped / 2, rtol=1e-9
  )


def test_it_starts_from_an_exported_policy_and_keeps_its_statistics(tmp_path):
  first = grpo()
  before, _ = first.step(first.init(KEY), (), KEY)
  policy_file.export(tmp_path, first.params(before))
  for make in (grpo, ppo):
    workflow = make(init_from=str(tmp_path))
    begun = workflow.init(jax.random.key(1))
    after, _ = workflow.step(begun, (), KEY)
    jax.tree.map(
      np.testing.assert_array_equal, begun.actor.params, before.actor.params
    )
    for state in (begun, after):
      jax.tree.map(
        np.testing.assert_array_equal, state.obs_stats, before.obs_stats
      )
    shapes = jax.eval_shape(make(init_from='nowhere').init, KEY)
    assert jax.tree.structure(shapes) == jax.tree.structure(begun)


def ppo(**kwargs):
  return workflows.embodied_ppo(
    jax_envs.line(),
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(1e-3),
    **(
      {'num_envs': 16, 'num_steps': 5, 'num_minibatches': 1, 'num_epochs': 1}
      | kwargs
    ),
  )


@pytest.mark.slow
def test_a_host_simulator_gives_the_metrics_of_the_same_env_in_jax():
  env = jax_envs.line()
  hosted = grpo(jax_envs.on_host(env))
  jax_envs.assert_same_metrics(grpo(), hosted, KEY, num_seeds=8)


def learned(env, steps):
  """Success of 100 seeds after so many steps."""
  workflow = workflows.embodied_grpo(
    env,
    functools.partial(gaussian_policy.policy, width=32),
    optimizers.adamw(6e-3, decay_steps=60, updates_per_step=16, clip_norm=0.5),
    num_envs=256,
    episode_reward=episode_stats.episode_return,
    num_minibatches=4,
    num_epochs=4,
  )
  state = workflow.init(KEY)
  for i in range(steps):
    state, _ = workflow.step(state, (), jax.random.fold_in(KEY, i))
  seed = np.arange(100, dtype=np.int32)
  return read(workflow.evaluate(state, seed, KEY))['eval/success_once']


@pytest.mark.slow
def test_it_learns_to_push():
  assert learned(push.push(), 60) > 0.4


@pytest.mark.claims
@pytest.mark.slow
def test_it_learns_nothing_from_rewards_of_chance():
  assert learned(jax_envs.with_random_reward(push.push()), 60) < 0.1
