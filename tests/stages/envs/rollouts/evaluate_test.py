"""Evaluations in environments leave out what simulators lost."""

import jax
import jax.numpy as jnp
import pytest

import jax_envs
from rlinf_jax.run import evaluation
from stages import base, metrics
from stages.envs import env as env_lib
from stages.envs.rollouts import evaluate
import tiny

HORIZON = 4


def step(state, action_BA):
  """Rows with an odd seed fail in their second step; the others succeed."""
  del action_BA
  seed_B, t_B = state
  failed_B = ((seed_B % 2 == 1) & (t_B == 1)).astype(float)
  done_B = jnp.maximum(failed_B, t_B == HORIZON - 1)
  timestep = env_lib.TimeStep(
    t_B,
    1.0 - failed_B,
    0.0 * done_B,
    done_B,
    t_B,
    1.0 - failed_B,
    env_failed=failed_B,
  )
  # The next episode of a row that failed is not evaluated.
  next_seed_B = jnp.where(failed_B > 0, seed_B + 1, seed_B)
  return (next_seed_B, jnp.where(done_B > 0, 0, t_B + 1)), timestep


def act(params, obs, key_B, *, greedy):
  del params, key_B, greedy
  zero_B = 0.0 * obs
  return base.Experience(obs, zero_B[:, None], zero_B, zero_B, zero_B)


def test_episodes_that_a_simulator_lost_are_counted_and_in_no_score():
  env = env_lib.Env(
    lambda seed_B: ((seed_B, 0 * seed_B), 0 * seed_B),
    step,
    jax.ShapeDtypeStruct((), jnp.int32),
    (-1.0,),
    (1.0,),
    HORIZON,
  )
  policy = base.Policy(lambda key: (), act, None)
  run = evaluate.evaluator(policy, env)
  info = run((), (), jnp.arange(5), jax.random.key(0))
  assert info['eval/success_once'].count == 3
  numbers = tiny.read(info)
  assert numbers['eval/failed'] == 2
  assert numbers['eval/success_at_end'] == 1.0
  assert numbers['eval/return'] == HORIZON


def test_success_is_reported_by_task():
  """Also of rows that are evaluated in pieces, and of tasks without a row."""
  env = env_lib.Env(
    lambda seed_B: ((seed_B, 0 * seed_B), 0 * seed_B),
    step_of_tasks,
    jax.ShapeDtypeStruct((), jnp.int32),
    (-1.0,),
    (1.0,),
    HORIZON,
    tasks=('reach', 'push', 'fly', 'lift'),
    task=lambda state: state[0] % 3,
  )
  run = evaluate.evaluator(base.Policy(lambda key: (), act, None), env)
  whole, *parts = (
    run((), (), seed_B, jax.random.key(0))
    for seed_B in (jnp.arange(8), jnp.arange(4), jnp.arange(4, 8))
  )
  numbers = tiny.read(whole)
  # The seeds 0, 3, 6 reach; 1, 4, 7 push; 2, 5 fly. From 4 on, all succeed.
  assert numbers['eval/reach/success_once'] == pytest.approx(1 / 3)
  assert numbers['eval/push/success_once'] == pytest.approx(2 / 3)
  assert numbers['eval/fly/success_once'] == 0.5
  assert numbers['eval/success_once'] == 0.5
  assert 'eval/lift/success_once' not in numbers
  tiny.assert_same_bits(metrics.merge(*parts), whole)
  table = evaluation.results(parts, None)
  assert list(table) == ['fly', 'push', 'reach', 'all']
  assert table['push']['success_once']['problems'] == 3
  assert table['all']['success_once']['problems'] == 8
  alone = env._replace(tasks=(), task=None)
  run = evaluate.evaluator(base.Policy(lambda key: (), act, None), alone)
  info = run((), (), jnp.arange(8), jax.random.key(0))
  assert {x for x in info if 'success' in x} == {
    'eval/success_once',
    'eval/success_at_end',
  }


def test_seeds_that_tasks_cannot_share_equally_are_refused():
  env = jax_envs.line()._replace(
    tasks=('reach', 'push'),
    task=lambda state: 0,
    task_group_size=2,
    equal_rows=4,
  )
  run = evaluate.evaluator(base.Policy(lambda key: (), act, None), env)
  with pytest.raises(ValueError, match='6 seeds .* a multiple of 4, or bind'):
    run((), (), jnp.arange(6), jax.random.key(0))


def step_of_tasks(state, action_BA):
  """Rows with a seed from 4 on succeed."""
  seed_B, _ = state
  (_, t_B), timestep = step(state, action_BA)
  success_B = (seed_B >= 4).astype(float)
  timestep = timestep._replace(success=success_B, env_failed=None)
  return (seed_B, t_B), timestep
