"""Behavior cloning: learning to do what was demonstrated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

import stages
from stages import base, metrics
from stages.envs import evaluate as evaluate_lib
from stages.envs import obs_stats
from stages.learn import train_step


class State(NamedTuple):
  """What a step reads and rewrites.

  Attributes:
    actor: what learns.
    obs_stats: moments of the demonstrated observations; `()` if none are kept.
  """

  actor: base.TrainState
  obs_stats: Any


def behavior_cloning(
  env: base.Env,
  policy: Callable[[base.Env], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  normalize_obs: bool = True,
) -> base.Workflow:
  """Maximizes the likelihood of each action that was demonstrated.

  A policy learns how far to deviate, too: as far as demonstrations do from what
  it can tell by what it sees. From there it may explore.

  Args:
    env: in which the policy is judged.
    policy: makes the policy to train from what a world shows and takes.
    optimizer: how gradients become updates.
    normalize_obs: whether observations are put on a scale of their own.

  Raises:
    ValueError: for a policy that squashes its samples.
  """
  policy = policy(env)
  _check(policy, env)

  def loss(params, scale, x: base.Demonstration):
    obs = obs_stats.normalize(scale, x.obs)
    now = policy.evaluate(params, obs, x.action)
    mean = metrics.mean(-now.logp)
    return (mean,), {
      'train/loss': mean,
      'train/entropy': metrics.mean(now.entropy),
    }

  gradient = stages.Stage(
    train_step.gradient(loss), 'gradient', 'sum', unbatched=(0, 1)
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  see = stages.Stage(
    lambda obs: obs_stats.from_batch(obs, env.obs_spec), 'obs_moments', 'sum'
  )
  widen = stages.Stage(lambda a, b: a.merge(b), 'update_obs_stats', 'batch')
  attempt = evaluate_lib.evaluator(policy, env)

  def init(key):
    fresh = evaluate_lib.init(policy, env, normalize_obs, key)
    return State(
      train_step.init(fresh['policy'], optimizer), fresh['obs_stats']
    )

  def step(state: State, batch: base.Demonstration, key):
    del key  # Nothing here is random.
    actor, scale = state
    if normalize_obs:
      scale = widen(scale, see(batch.obs))
    actor, info = apply(actor, gradient(actor.params, scale, batch))
    return State(actor, scale), info

  def evaluate(state: State, seed, key):
    return attempt(state.actor.params, state.obs_stats, seed, key)

  return base.Workflow(
    init, step, evaluate, evaluate_lib.policy_state, score='eval/success_once'
  )


def _check(policy: base.Policy, env: base.Env):
  """Refuses policies whose commands are not what they draw, within bounds."""
  if policy.to_env_action is None:
    return
  high = np.array(env.action_high)
  most = np.asarray(policy.to_env_action(jnp.ones((1, *high.shape))))[0]
  if not np.allclose(most, high, atol=1e-3 * np.abs(high).max()):
    raise ValueError(
      'Demonstrations say what was commanded, where one is the end of a range, '
      f"and this policy's one commands {most.tolist()} and not "
      f"{high.tolist()}: it squashes its samples, so give it bounding = 'clip'."
    )
