"""PPO in environments: its updates, episodes, simulators and learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
import jax_envs
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.runtime import local
from stages import workflows
from stages.envs import action_chunks, push, reach
from stages.learn import optimizers
from stages.models.control import gaussian_policy
from tiny import read

KEY = jax.random.key(0)


@functools.cache
def ppo(env=None, **kwargs):
  settings = {
    'num_envs': 8,
    'num_steps': 6,
    'num_minibatches': 2,
    'num_epochs': 2,
  } | kwargs
  return workflows.embodied_ppo(
    env or push.push(horizon=5),
    functools.partial(gaussian_policy.policy, width=8),
    optimizers.adamw(settings.pop('rate', 1e-3)),
    **settings,
  )


# Workflow.


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


def test_errors_of_the_critic_alone_are_not_magnified():
  """Advantages of a batch without any reward stay as they are."""
  env = push.push(horizon=5)

  def step(state, action_BA):
    state, timestep = env.step(state, action_BA)
    return state, timestep._replace(reward=0.0 * timestep.reward)

  results = []
  for normalize in (True, False):
    workflow = ppo(
      env._replace(step=step), normalize_advantages=normalize, num_epochs=1
    )
    state, info = workflow.step(workflow.init(KEY), (), KEY)
    results.append((state.actor.params, read(info)))
  (params, numbers), (raw_params, raw_numbers) = results
  jax.tree.map(np.testing.assert_array_equal, params, raw_params)
  assert numbers == raw_numbers


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
  workflow = workflows.embodied_ppo(
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


@pytest.mark.slow
def test_without_a_finished_episode_there_are_no_episode_metrics():
  workflow = ppo(push.push(horizon=50))
  _, info = workflow.step(workflow.init(KEY), (), KEY)
  assert not any(name.startswith('env/success') for name in read(info))


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
  in_memory.start(runtime, start)
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


def learn(env, steps):
  """Evaluations before and after learning."""
  workflow = workflows.embodied_ppo(
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


# Learning.


@pytest.mark.slow
def test_ppo_learns_to_reach():
  before, after = learn(reach.reach(), 60)
  assert before['eval/success_at_end'] < 0.1
  assert after['eval/success_at_end'] > 0.5


@pytest.mark.claims
@pytest.mark.slow
def test_ppo_does_not_learn_to_reach_from_rewards_of_chance():
  _, control = learn(jax_envs.with_random_reward(reach.reach()), 60)
  assert control['eval/success_at_end'] < 0.2


@pytest.mark.claims
@pytest.mark.slow
def test_ppo_learns_to_push_and_not_from_rewards_of_chance():
  _, after = learn(push.push(), 120)
  _, control = learn(jax_envs.with_random_reward(push.push()), 120)
  assert after['eval/success_at_end'] > 0.8
  assert control['eval/success_once'] < 0.2
