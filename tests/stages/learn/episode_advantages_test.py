"""Advantages of episodes in one batch, by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import claims
from stages import base, metrics
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.workflows.embodied_ppo import (
  compute_advantages,
  describe,
  whiten_advantages,
)
from tests.stages.learn import ppo_cases

GAMMA, LAMBDA = 0.9, 0.8


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
  timestep = env_lib.TimeStep(
    (),
    reward,
    terminated.astype(float),
    truncated.astype(float),
    final_obs[..., None],
    terminated * (rng.random((B, T)) < 0.5),
    rng.integers(1, 4, (B, T)).astype(float),
  )
  none = np.zeros((B, T))
  return base.Experience(obs[..., None], none, none, none + 1, none), timestep


def brute_force(obs_T, timestep, on_success=False):
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
        if timestep.terminated[k] and not (on_success and timestep.success[k]):
          after = 0.0
        delta = timestep.reward[k] + discount * after - obs_T[k]
        advantage_T[t] += weight * delta
        weight *= discount * LAMBDA
    begin = end + 1
  return advantage_T


@pytest.mark.slow
@pytest.mark.parametrize(
  'on_success, rows',
  claims.some(
    [(False, 10_000), (False, 500), (True, 500)],
    [
      (False, 500),
      (True, 500),
    ],
  ),
)
def test_advantages_are_those_of_each_episode_by_itself(
  in_float64, on_success, rows
):
  x, timestep = layouts(rows)
  done_BT = timestep.terminated + timestep.truncated
  assert (done_BT.sum(0) > 0).all()  # At every position.
  result = with_advantages(x, timestep, on_success)
  for i in range(len(done_BT)):
    row = jax.tree.map(lambda x, i=i: x[i], timestep)
    want_T = brute_force(x.obs[i, :, 0], row, on_success)
    np.testing.assert_allclose(result.advantage[i], want_T, atol=1e-12)
  np.testing.assert_allclose(
    result.return_, result.advantage + x.obs[..., 0], atol=1e-12
  )


def as_jax(tree):
  return jax.tree.map(jnp.asarray, tree)


def with_advantages(x, timestep, on_success=False):
  """Experience with the advantage and return of each step."""
  return x._replace(
    **compute_advantages(
      ppo_cases.Critic,
      GAMMA,
      LAMBDA,
      on_success,
      None,
      (),
      *map(as_jax, (x, timestep)),
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


def test_a_failure_ends_the_return_where_success_does_not(in_float64):
  x, timestep = layouts(50)
  result = with_advantages(x, timestep, on_success=True)
  succeeds = timestep.success > 0
  fails = (timestep.terminated > 0) & ~succeeds
  assert succeeds.any() and fails.any()
  assert (result.discount[fails] == 0).all()
  assert (result.discount[succeeds] > 0).all()


def test_lost_steps_are_in_no_metric(in_float64):
  x, timestep = layouts(50)
  lost = np.zeros_like(timestep.reward)
  lost[:, 4] = timestep.truncated[:, 4] = 1.0
  timestep.terminated[:, 4] = timestep.success[:, 4] = 0.0
  timestep = timestep._replace(env_failed=lost)
  _, ended = episode_stats.update(episode_stats.init(50), as_jax(timestep))
  numbers, _ = metrics.read(
    describe(with_advantages(x, timestep), as_jax(timestep), ended)
  )
  kept = timestep.reward[lost == 0]
  np.testing.assert_allclose(numbers['rollout/reward_mean'], kept.mean())
  result = with_advantages(x, timestep)
  error = np.asarray(result.return_ - result.value)[lost == 0]
  truth = np.asarray(result.return_)[lost == 0]
  np.testing.assert_allclose(
    numbers['train/explained_variance'], 1 - error.var() / truth.var()
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


class CriticOfActions:
  """The observation has Z numbers, which are the values of its actions."""

  @staticmethod
  def value(params, obs):
    del params
    return obs


def in_chunks(B=200, T=5, Z=3, seed=0):
  """Random episodes in chunks of Z actions, with a value of each action."""
  rng = np.random.default_rng(seed)
  _, timestep = layouts(B, T, seed)
  done = timestep.terminated + timestep.truncated
  obs, final_obs, reward = rng.normal(size=(3, B, T, Z))
  final_obs[:, :-1][done[:, :-1] == 0] = obs[:, 1:][done[:, :-1] == 0]
  # A chunk is cut short by the end of its episode alone.
  steps = np.where(done > 0, rng.integers(1, Z + 1, (B, T)), Z)
  reward[np.arange(Z) >= steps[..., None]] = 0.0
  timestep = timestep._replace(
    final_obs=final_obs, steps=steps.astype(float), action_reward=reward
  )
  none = np.zeros((B, T))
  return base.Experience(obs, none, none, none + 1, none), timestep


def test_advantages_of_actions_are_those_of_single_steps(in_float64):
  x, timestep = in_chunks()
  estimate = jax.jit(
    lambda *given: compute_advantages(
      CriticOfActions, GAMMA, LAMBDA, True, None, (), *given
    )
  )
  got = estimate(*as_jax((x, timestep)))
  for i in range(len(x.obs)):
    executed = np.arange(x.obs.shape[2]) < timestep.steps[i][:, None]
    last = np.arange(x.obs.shape[2]) == timestep.steps[i][:, None] - 1
    # The row as if each action had been a step.
    single = lambda y, executed=executed: y[executed]
    of_step = lambda y, last=last: single(np.where(last, y[i][:, None], 0.0))
    value_T = single(x.obs[i])
    final_T = np.append(value_T[1:], 0.0)
    is_last = single(last) > 0
    final_T[is_last] = timestep.final_obs[i][:, 0]
    row = timestep._replace(
      reward=single(timestep.action_reward[i]),
      terminated=of_step(timestep.terminated),
      truncated=of_step(timestep.truncated),
      success=of_step(timestep.success),
      final_obs=final_T[:, None],
      steps=np.ones(len(value_T)),
    )
    want_T = brute_force(value_T, row, on_success=True)
    np.testing.assert_allclose(
      np.asarray(got['advantage'][i])[executed], want_T, atol=1e-12
    )
  np.testing.assert_array_equal(got['return_'], got['advantage'] + x.obs)


def test_a_chunk_that_a_simulator_lost_teaches_nothing(in_float64):
  x, timestep = in_chunks(20)
  lost = np.zeros_like(timestep.reward)
  lost[:, 2] = timestep.truncated[:, 2] = 1.0
  timestep.terminated[:, 2], timestep.steps[:, 2] = 0.0, 1.0
  got = compute_advantages(
    CriticOfActions,
    GAMMA,
    LAMBDA,
    False,
    None,
    (),
    *as_jax((x, timestep._replace(env_failed=lost))),
  )
  assert (got['advantage'][:, 2] == 0).all() and (got['mask'][:, 2] == 0).all()
  # The chunk before is as if time had been up then.
  short = jax.tree.map(lambda y: y[:, :2], (x, timestep))
  short[1].truncated[:, 1] = 1.0 - short[1].terminated[:, 1]
  want = compute_advantages(
    CriticOfActions, GAMMA, LAMBDA, False, None, (), *as_jax(short)
  )
  executed = np.arange(3) < short[1].steps[..., None]
  difference = np.asarray(got['advantage'][:, :2] - want['advantage'])
  np.testing.assert_allclose(difference[executed], 0.0, atol=1e-12)


def test_metrics_and_whitening_count_executed_actions():
  x, timestep = in_chunks(50)
  estimated = compute_advantages(
    CriticOfActions, GAMMA, LAMBDA, False, None, (), *as_jax((x, timestep))
  )
  x = x._replace(**estimated)
  executed = np.arange(3) < timestep.steps[..., None]
  _, ended = episode_stats.update(episode_stats.init(50), as_jax(timestep))
  numbers, _ = metrics.read(describe(x, as_jax(timestep), ended))
  np.testing.assert_allclose(
    numbers['rollout/reward_mean'],
    timestep.action_reward[executed].mean(),
    rtol=1e-5,
  )
  whitened = np.asarray(
    whiten_advantages(x.advantage, x.mask, x.reward, x.steps)
  )[executed]
  np.testing.assert_allclose(whitened.mean(), 0.0, atol=1e-5)
  np.testing.assert_allclose(whitened.std(ddof=1), 1.0, rtol=1e-3)
