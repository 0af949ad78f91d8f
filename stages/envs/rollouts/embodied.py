"""Shared parts of workflows that act in environments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import stages
from stages import base
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.envs.rollouts import evaluate, obs_stats, policy_file, rollout


def init(
  policy: base.Policy,
  env: env_lib.Env,
  key: base.Key,
  normalize_obs: bool,
  init_from: str | None = None,
) -> tuple[Any, Any]:
  """Returns a policy's first parameters, and its observation statistics.

  Args:
    policy: the policy to train.
    env: environments whose observations it reads.
    key: key of the initial parameters.
    normalize_obs: whether observations are normalized; else statistics are
      `()`.
    init_from: folder of an exported policy; None for random parameters and
      empty statistics.
  """
  initial = evaluate.init(policy, env, normalize_obs, key)
  initial = policy_file.start(init_from, initial)
  return initial['policy'], initial['obs_stats']


def reset(
  env: env_lib.Env, num_envs: int, key: base.Key
) -> tuple[Any, Any, Any]:
  """Resets environments by random seeds, outside of a step.

  Returns:
    `env_state, obs, episodes`, the last of which are running episode
    statistics.
  """
  seed_B = jax.random.randint(
    key, (num_envs,), 0, jnp.iinfo(jnp.int32).max, jnp.int32
  )
  return *rollout.init(env, seed_B), episode_stats.init(num_envs)


def update_obs_stats(env: env_lib.Env | None, enabled: bool) -> Callable:
  """Returns `obs_stats, obs -> obs_stats`: adds a batch of observations.

  Two stages: moments of the batch, which add up over its pieces, and their
  merge. If not `enabled`, statistics are returned as they are.
  """
  if not enabled:
    return lambda stats, obs: stats
  moments = stages.Stage(
    lambda obs: obs_stats.from_batch(obs, env.obs_spec), 'obs_moments', 'sum'
  )
  merge = stages.Stage(lambda a, b: a.merge(b), 'update_obs_stats', 'batch')
  return lambda stats, obs: merge(stats, moments(obs))


def workflow(
  init: Callable,
  step: Callable,
  policy: base.Policy,
  eval_env: env_lib.Env,
  policy_state: Callable = evaluate.policy_state,
) -> base.Workflow:
  """Completes a workflow with greedy evaluation of the policy and its export.

  Args:
    init: as in `base.Workflow`.
    step: as in `base.Workflow`.
    policy: the policy that is trained.
    eval_env: environments to evaluate it in.
    policy_state: `state -> {'policy': params, 'obs_stats': …}`.
  """
  evaluate_policy = evaluate.evaluator(policy, eval_env)

  def evaluate_state(state, seed_B, key):
    now = policy_state(state)
    return evaluate_policy(now['policy'], now['obs_stats'], seed_B, key)

  return base.Workflow(
    init, step, evaluate_state, policy_state, score='eval/success_once'
  )
