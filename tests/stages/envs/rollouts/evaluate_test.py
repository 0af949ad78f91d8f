"""Evaluations in environments leave out what simulators lost."""

import jax
import jax.numpy as jnp

from stages import base
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
