"""Behavior cloning: supervised learning of demonstrated actions."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

import stages
from stages import base, granularity, metrics, tree_paths
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.envs.rollouts import embodied, obs_stats
from stages.envs.rollouts import evaluate as evaluate_lib
from stages.learn import train_step


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained.
    obs_stats: moments of the demonstrated observations; `()` if not normalized.
  """

  actor: base.TrainState
  obs_stats: Any


def behavior_cloning(
  env: env_lib.Env | None,
  policy: Callable[[env_lib.Env | None], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  normalize_obs: bool = True,
) -> base.Workflow:
  """Maximizes the likelihood of each demonstrated action.

    L = −mean log π(a|s)

  A policy with an `imitation_loss`, such as that of flow matching, minimizes
  the mean of this one instead.

  The likelihood also fits the policy's standard deviation, to the spread of
  demonstrations around what the observation predicts; reinforcement learning
  that starts from the clone explores by it.

  Args:
    env: environments in which the policy is evaluated. None for data of a robot
      without a simulator: evaluation batches are held-out demonstrations then,
      and the score is `eval/agreement`, see `agreement`.
    policy: makes the policy for an environment's observations and actions.
    optimizer: optimizer of the parameters.
    normalize_obs: whether observations are normalized by running moments; not
      possible without an environment.

  Raises:
    ValueError: for a policy that squashes its samples, or normalization without
      an environment; in the first step, for demonstrations that do not have the
      environment's observations.
  """
  policy = policy(env)
  if env is None and normalize_obs:
    raise ValueError(
      'Observations are normalized by what an environment says of them, and '
      'none is given: set normalize_obs = False.'
    )
  if env is not None:
    _check(policy, env)
  update_obs_stats = embodied.update_obs_stats(env, normalize_obs)

  def loss(params, stats, x: base.Demonstration, *key_B):
    obs = obs_stats.normalize(stats, x.obs)
    if policy.imitation_loss is not None:
      loss_B = policy.imitation_loss(params, obs, x.action, *key_B, train=True)
      return (metrics.mean(loss_B),), {'train/loss': metrics.mean(loss_B)}
    now = policy.evaluate(params, obs, x.action)
    mean = metrics.mean(-granularity.whole(now.logp, 1))
    return (mean,), {
      'train/loss': mean,
      'train/entropy': metrics.mean(granularity.whole(now.entropy, 1)),
    }

  learn = train_step.learner(loss, optimizer, unbatched=(0, 1))

  def draws(key, obs):
    if policy.imitation_loss is None:
      return ()  # A likelihood draws nothing.
    return (stages.keys(key, obs),)

  def init(key):
    params, stats = embodied.init(policy, env, key, normalize_obs)
    return State(train_step.init(params, optimizer), stats)

  def step(state: State, batch: base.Demonstration, key):
    if env is not None:
      _check_obs(batch.obs, env)
    stats = update_obs_stats(state.obs_stats, batch.obs)
    minibatch = batch, *draws(key, batch.obs)
    actor, info = learn(state.actor, [minibatch], stats)
    return State(actor, stats), info

  if env is not None:
    return embodied.workflow(init, step, policy, env)
  score = stages.Stage(
    agreement(policy), 'score', 'sum', (0,), rounds=policy.rounds
  )

  def evaluate(state: State, batch: base.Demonstration, key):
    return score(state.actor.params, batch, *draws(key, batch.obs))

  return base.Workflow(
    init, step, evaluate, evaluate_lib.policy_state, score='eval/agreement'
  )


def agreement(policy: base.Policy) -> Callable:
  """Returns `params, demonstrations, *keys -> info` of imitating them.

  `eval/loss` is what cloning minimizes, and `eval/agreement` the mean over rows
  of min(1, exp(−l)), where l is the loss for each number of an action: of
  losses that are sums over n numbers, l = loss / n. Of tokens, exp(−l) is the
  geometric mean of their probabilities, of an L1 loss exp(−mean error), and of
  flow matching exp(−mean squared error of the velocity).
  """

  def score(params, x: base.Demonstration, *key_B):
    if policy.imitation_loss is not None:
      loss_B = policy.imitation_loss(params, x.obs, x.action, *key_B)
    else:
      logp = policy.evaluate(params, x.obs, x.action).logp
      loss_B = -granularity.whole(logp, 1)
    n = 1 if policy.imitation_is_mean else math.prod(x.action.shape[1:])
    return {
      'eval/loss': metrics.mean(loss_B),
      'eval/agreement': metrics.score(jnp.minimum(1.0, jnp.exp(-loss_B / n))),
    }

  return score


def _check_obs(obs, env: env_lib.Env):
  """Refuses demonstrations of other observations than the environment's."""

  def kinds(tree, leading):
    return {
      name: (np.dtype(x.dtype).kind, [*x.shape[leading:]])
      for name, x in tree_paths.flatten(tree).items()
    }

  want, got = kinds(env.obs_spec, 0), kinds(obs, 1)
  names = {'u': 'bytes', 'i': 'integers', 'f': 'numbers', 'b': 'truth values'}
  differ = sorted(k for k in want | got if want.get(k) != got.get(k))
  if differ:
    name = differ[0]
    shown, seen = (
      f'{names[x[name][0]]} {x[name][1]}' if name in x else 'absent'
      for x in (got, want)
    )
    raise ValueError(
      f'The observation {name!r} is {shown} in the demonstrations and {seen} '
      'in the environment: record demonstrations in this environment, with the '
      'same cameras and pictures of the same size.'
    )


def _check(policy: base.Policy, env: env_lib.Env):
  """Refuses policies that do not command an environment's bound by action 1."""
  action_range.check_continuous(env)
  if policy.to_env_action is None or policy.imitation_loss is not None:
    return
  high = np.array(env.action_high)
  most = np.asarray(policy.to_env_action(jnp.ones((1, *high.shape))))[0]
  if not np.allclose(most, high, atol=1e-3 * np.abs(high).max()):
    raise ValueError(
      'In demonstrations an action of 1 is the upper bound of the environment, '
      f'and this policy maps it to {most.tolist()} instead of '
      f"{high.tolist()}: it squashes its samples, so give it bounding = 'clip'."
    )
