"""Soft actor-critic: targets by hand, gradients by torch, learning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import in_memory
import jax_envs
from planner.ir import flow as flow_lib
from planner.ir import plan as plan_lib
from rlinf_jax.run_files import checkpoint
from rlinf_jax.runtime import local
import saved
from stages import base, metrics, workflows
from stages.envs import env as env_lib
from stages.envs import push, reach, replay
from stages.envs.rollouts import policy_file
from stages.learn import optimizers, soft_actor_critic
from stages.models.control import critics as critics_lib
from stages.models.control import gaussian_policy
from stages.workflows.sac import (
  default_target_entropy,
  num_updates,
  store_and_sample,
  uniform_while_warm,
)
import tiny
from tiny import read

KEY = jax.random.key(0)
GAMMA = 0.9


# Targets.


# The observation is a number. One critic adds its parameter to it, the other a
# hundred.
ABOUT = critics_lib.Critic(
  lambda key: (),
  lambda params, obs, command: jnp.stack(
    [obs[:, 0] + params, obs[:, 0] + 100.0]
  ),
)


def timestep(reward, terminated, truncated, final_obs, **kwargs):
  reward, terminated, truncated, final_obs = (
    jnp.asarray([x], float) for x in (reward, terminated, truncated, final_obs)
  )
  return env_lib.TimeStep(
    (),
    reward,
    terminated,
    truncated,
    final_obs[..., None],
    **{'success': 0 * reward} | kwargs,
  )


def stored(obs, timestep, capacity=8, **kwargs):
  """The replay after an environment's steps, in the order of their rewards."""
  obs = jnp.asarray([obs], float)[..., None]
  one = jnp.ones(obs.shape[:2])
  x = base.Experience(obs, 0.0 * obs, 0.0 * one, one, 0.0 * one)
  number = jax.ShapeDtypeStruct((), float)
  like = jax.ShapeDtypeStruct((1,), float)
  like = replay.Transition(like, like, number, number, like)
  store = jax.jit(
    functools.partial(
      store_and_sample, jax_envs.IdlePolicy, GAMMA, 1, 4, **kwargs
    )
  )
  return store(replay.empty(like, capacity), (), x, timestep, KEY)


def test_targets_are_those_worked_by_hand(in_float64):
  """Three steps: one goes on, one is truncated and one terminates.

  An episode that begins anew shows 50: no target may know of it.
  """
  kept, *_ = stored(
    [1.0, 2.0, 50.0],
    timestep([10.0, 20.0, 30.0], [0, 0, 1], [0, 1, 0], [2.0, 3.0, 51.0]),
  )
  row = jax.tree.map(lambda x: x[:3], kept.rows)
  temperature = 0.5
  loss = jax.jit(
    soft_actor_critic.critic_objective(jax_envs.IdlePolicy, ABOUT, None)
  )
  actor = {'policy': (), 'log_temperature': jnp.log(temperature)}
  # y = r + γ (min(s′ + 1, s′ + 100) + ½ · 3), or r where it terminates.
  want = [10 + 0.9 * (3.0 + 1.5), 20 + 0.9 * (4.0 + 1.5), 30.0]
  # Critics say s − 4 and s + 100 of what was done.
  errors = [
    (s - 4.0 - y) ** 2 + (s + 100.0 - y) ** 2
    for s, y in zip([1.0, 2.0, 50.0], want, strict=True)
  ]
  batch = replay.Sample(row, jax.random.split(KEY, 3))
  (mean,), info = loss(-4.0, 1.0, actor, (), KEY, 0, batch)
  np.testing.assert_allclose(mean.sum, 0.5 * sum(errors), rtol=1e-12)
  assert mean.count == 3
  np.testing.assert_allclose(
    metrics.read(info)[0]['train/q_value'], (53 - 12 + 53 + 300) / 6
  )


def test_a_chunk_counts_by_the_steps_that_were_made_of_it(in_float64):
  kept, *_ = stored(
    [1.0, 2.0],
    timestep([1, 1], [0, 1], [0, 0], [2.0, 3.0], steps=jnp.array([[3.0, 2.0]])),
  )
  np.testing.assert_allclose(kept.rows.discount[:2], [GAMMA**3, 0.0])


def test_success_may_end_nothing_and_a_failure_always_does(in_float64):
  success = jnp.array([[0.0, 1.0, 0.0, 0.0]])
  steps = timestep(
    [1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1], [2.0] * 4, success=success
  )
  kept, *_ = stored([1.0] * 4, steps, bootstrap_on_success=True)
  np.testing.assert_allclose(kept.rows.discount[:4], [GAMMA, GAMMA, 0.0, GAMMA])


def test_transitions_of_a_file_do_not_tell_success_from_failure():
  with pytest.raises(ValueError, match='which terminations were successes'):
    sac(offline_data='demonstrations.npz', bootstrap_on_success=True)


def test_failed_steps_are_not_stored(in_float64):
  kept, sample, info = stored(
    [1.0, 2.0, 3.0],
    timestep(
      [7, 8, 9],
      [0, 0, 0],
      [0, 1, 0],
      [2.0, 2.0, 4.0],
      env_failed=jnp.array([[0.0, 1.0, 0.0]]),
    ),
  )
  assert int(kept.filled) == 2
  assert {*np.asarray(kept.rows.reward[:2])} == {7.0, 9.0}
  assert {*np.asarray(sample.row.reward)} <= {7.0, 9.0}
  assert metrics.read(info)[0]['replay/filled'] == 2 / 8


# Workflow.


@functools.cache
def sac(env=None, eval_env=None, **kwargs):
  settings = {
    'num_envs': 4,
    'num_steps': 3,
    'capacity': 50_000,
    'batch_size': 8,
    'utd_ratio': 0.5,
    'actor_update_period': 3,
  } | kwargs
  return workflows.sac(
    env or push.push(horizon=5),
    functools.partial(gaussian_policy.policy, width=8),
    functools.partial(critics_lib.ensemble, width=8),
    optimizers.adamw(1e-3),
    eval_env=eval_env,
    **settings,
  )


ONE = {
  'num_envs': 1,
  'num_steps': 12,
  'capacity': 12,
  'utd_ratio': 1 / 12,
  'actor_update_period': 1,
}


def test_a_policy_at_random_does_anything_as_likely():
  policy = gaussian_policy.policy(
    push.push(), width=8, bounding='tanh', critic=False
  )
  obs, key_B = jnp.zeros((2000, 10)), jax.random.split(KEY, 2000)
  params = policy.init(KEY)
  act = jax.jit(uniform_while_warm(policy).act)
  own, uniform = (act((params, warm), obs, key_B) for warm in (False, True))
  want = policy.act(params, obs, key_B).action
  np.testing.assert_array_equal(own.action, want)
  command = np.asarray(policy.to_env_action(uniform.action))
  for x in (-0.9, -0.5, 0.0, 0.5, 0.9):
    p = (x + 1) / 2  # Of 2000 draws; five deviations.
    most = 5 * (p * (1 - p) / 2000) ** 0.5
    assert (abs((command < x).mean(0) - p) < most).all()


@pytest.mark.slow
def test_nothing_is_learned_while_it_warms_up_and_then_critics_more_often():
  workflow = sac()
  begin = workflow.init(KEY)
  first, _ = workflow.step(begin, (), KEY)
  for name in ('actor', 'critic', 'target'):
    tiny.assert_same_bits(getattr(first, name), getattr(begin, name))
  second, info = workflow.step(first, (), jax.random.fold_in(KEY, 1))
  assert (int(second.critic.step), int(second.actor.step)) == (6, 2)
  # Metrics are of all updates.
  assert info['train/value_loss'].count == 6 * 8
  assert info['train/policy_loss'].count == 2 * 8


def test_a_policy_is_exported_without_what_it_was_taught_by(tmp_path):
  workflow = sac()
  exported = workflow.params(workflow.init(KEY))
  assert exported.keys() == {'policy', 'obs_stats'}
  assert exported['policy'].keys() == {'actor'}
  policy_file.export(tmp_path, exported)
  tiny.assert_same_bits(policy_file.read(tmp_path, exported), exported)


@pytest.mark.slow
def test_averages_of_critics_follow_them():
  workflow = sac(**ONE, learning_starts=0, tau=0.25)
  state = workflow.init(KEY)
  after, _ = workflow.step(state, (), KEY)
  assert int(after.critic.step) == 1
  want = jax.tree.map(
    lambda new, old: 0.25 * new + 0.75 * old, after.critic.params, state.target
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after.target, want
  )


@pytest.mark.parametrize('utd, delay', [(0.3, 1), (0.5, 4), (0.01, 1)])
def test_updates_that_do_not_come_out_even_are_refused(utd, delay):
  with pytest.raises(ValueError, match='must be a whole number of at least 1'):
    num_updates(utd, 12, delay)


@pytest.mark.parametrize('terminate', [False, True])
def test_an_episode_is_stored_as_it_happened(terminate):
  """Time ends nothing; success may. The next episode is never what follows."""
  env = None  # That of other tests, which share what is compiled.
  if terminate:  # A task that is solved by luck: at the third step of all.
    env = push.push(horizon=5, terminate=True)
    inner = env.step

    def step(state, command):
      state, timestep = inner(state, command)
      third = (state.time + 5 * state.episode == 3).astype(float)
      return state, timestep._replace(terminated=third)

    env = env._replace(step=step)
  workflow = sac(env, **ONE, learning_starts=0, tau=0.25)
  state, _ = workflow.step(workflow.init(KEY), (), KEY)
  row = jax.device_get(state.replay.rows)
  ended = [2] if terminate else []
  assert list(np.flatnonzero(row.discount == 0)) == ended
  np.testing.assert_allclose(np.delete(row.discount, ended), 0.99, rtol=1e-6)
  same = (row.next_obs[:-1] == row.obs[1:]).all(1)
  # Horizons of five: after steps 5 and 10 another episode begins.
  assert list(np.flatnonzero(~same)) == [4, 9]
  goal = lambda obs: obs[:, 4:6]
  np.testing.assert_array_equal(goal(row.next_obs), goal(row.obs))


def test_target_entropy_is_in_the_units_of_the_environment():
  env = jax_envs.push_in_bounds()
  like = jax.ShapeDtypeStruct((2,), jnp.float32)
  entropy = default_target_entropy(env, like)
  np.testing.assert_allclose(entropy, -2 + np.log(1.0) + np.log(1.5))
  chunk = jax.ShapeDtypeStruct((3, 2), jnp.float32)
  np.testing.assert_allclose(default_target_entropy(env, chunk), 3 * entropy)


def planned(workflow, state, sketch=None):
  step = flow_lib.trace(workflow.step, state, (), KEY)
  runtime = local.LocalRuntime(
    plan_lib.parse(sketch or {}, step.stages), step=step
  )
  in_memory.start(runtime, state)
  return runtime


@pytest.mark.slow
def test_the_replay_is_updated_in_place_and_checkpointed(tmp_path):
  """However much there is, a step copies none of it; and all of it lasts."""
  workflow, where = sac(), set()
  runtime = planned(workflow, workflow.init(KEY))
  checkpoints = checkpoint.Checkpoints(tmp_path / 'checkpoints', 1)
  source = {'seed': np.array(0)}
  for i in range(3):
    if i == 2:
      checkpoints.save(2, runtime, source, {})
      checkpoints.close()
    runtime.step((), jax.random.fold_in(KEY, i))
    rows = jax.tree.leaves(in_memory.state(runtime).replay.rows)
    where.add(tuple(x.unsafe_buffer_pointer() for x in rows))
  assert len(where) == 1
  assert int(in_memory.state(runtime).replay.filled) == 36
  again = planned(workflow, workflow.init(jax.random.key(9)))
  checkpoints = checkpoint.Checkpoints(tmp_path / 'checkpoints', 1)
  again.start(
    saved.load(checkpoints, in_memory.state(again), source)[0].state, 2
  )
  checkpoints.close()
  again.step((), jax.random.fold_in(KEY, 2))
  tiny.assert_same_bits(in_memory.state(again), in_memory.state(runtime))
  runtime.close()
  again.close()


@pytest.mark.slow
def test_a_host_simulator_gives_the_metrics_of_the_same_env_in_jax():
  env = push.push(horizon=5)
  hosted = sac(jax_envs.on_host(env), jax_envs.on_host(env))
  states = jax_envs.assert_same_metrics(sac(), hosted, KEY, num_seeds=4)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    states[1].replay,
    states[0].replay,
  )


# Learning.


def learn(env, steps=80):
  """Evaluations before and after learning."""
  workflow = workflows.sac(
    env,
    functools.partial(gaussian_policy.policy, width=64),
    functools.partial(critics_lib.ensemble, width=64),
    optimizers.adamw(2e-3, clip_norm=10.0),
    num_envs=64,
    num_steps=4,
    capacity=50_000,
    utd_ratio=0.25,
    learning_starts=8,
    discount=0.9,
    tau=0.02,
    init_temperature=0.2,
  )
  seed = np.arange(100, dtype=np.int32)
  runtime = planned(workflow, workflow.init(KEY))
  before = read(workflow.evaluate(in_memory.state(runtime), seed, KEY))
  for i in range(steps):
    runtime.step((), jax.random.fold_in(KEY, i))
  after = read(workflow.evaluate(in_memory.state(runtime), seed, KEY))
  runtime.close()
  return before, after


@pytest.mark.slow
def test_sac_learns_to_reach():
  before, after = learn(reach.reach())
  assert before['eval/success_at_end'] < 0.1
  # Four keys reached 0.60 to 0.82 by then, of which 0.05 is a standard error.
  assert after['eval/success_at_end'] > 0.4


@pytest.mark.claims
@pytest.mark.slow
def test_sac_learns_nothing_from_rewards_of_chance():
  _, control = learn(jax_envs.with_random_reward(reach.reach()))
  assert control['eval/success_at_end'] < 0.2
