"""Proximal policy optimization in environments, arXiv:1707.06347."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, granularity, metrics, ranges
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.envs.rollouts import embodied, obs_stats, rollout
from stages.learn import (
  advantages,
  loss_terms,
  losses,
  minibatches,
  objectives,
  rollout_correction,
  signatures,
  train_step,
)


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: the policy being trained, its critic included.
    obs_stats: running moments of observations; `()` if not normalized.
    env_state: state of the environments, or their tokens.
    obs: their current observations.
    episodes: running statistics of unfinished episodes.
  """

  actor: base.TrainState
  obs_stats: Any
  env_state: Any
  obs: Any
  episodes: episode_stats.Running


def embodied_ppo(
  env: env_lib.Env,
  policy: Callable[[env_lib.Env], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: ranges.PositiveInt,
  num_steps: ranges.PositiveInt,
  discount: ranges.Fraction = 0.99,
  gae_lambda: ranges.Fraction = 0.95,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  dual_clip: ranges.AboveOne | None = None,
  value_coef: ranges.NonNegativeFloat = 0.5,
  value_clip: ranges.PositiveFloat | None = None,
  value_huber: ranges.PositiveFloat | None = None,
  entropy_coef: float = 0.0,
  num_minibatches: ranges.PositiveInt = 4,
  num_epochs: ranges.PositiveInt = 4,
  target_kl: ranges.PositiveFloat | None = None,
  normalize_obs: bool = True,
  normalize_advantages: bool = True,
  bootstrap_on_success: bool = False,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  init_from: str | None = None,
  eval_env: env_lib.Env | None = None,
) -> base.Workflow:
  """Collects steps in many environments and learns from all of them.

    L = mean(max(−ρ A, −clip(ρ) A) + c_v L_value − c_e H)

  Where the policy has log-probabilities of tokens or of actions of a chunk
  (`granularity`), ρ and H are theirs, and the mean is over all of them. A and
  L_value are those of their action if the policy has values of actions, else of
  their step.

  Args:
    env: environments to act in.
    policy: makes the policy for an environment's observations and actions.
    optimizer: optimizer of the parameters.
    num_envs: number of environments.
    num_steps: steps in each environment, per batch.
    discount: γ, per environment step.
    gae_lambda: λ of generalized advantage estimation.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1.
    dual_clip: bound of the loss where the advantage is negative; None for none.
    value_coef: c_v, weight of the critic's loss.
    value_clip: how far a value may move from the one that was recorded; None
      for no bound.
    value_huber: error beyond which the critic's loss is linear (Huber); None
      for a squared error. Not together with `value_clip`.
    entropy_coef: c_e, weight of the entropy bonus.
    num_minibatches: minibatches of a batch, with an update each.
    num_epochs: passes over each batch, shuffled anew in each.
    target_kl: stops the updates of a step once KL(π_old‖π) of a minibatch is
      beyond this; None makes all updates. Learning-rate schedules count only
      the updates that are made.
    normalize_obs: whether observations are normalized by running moments.
    normalize_advantages: whether the advantages of a batch are whitened, unless
      all of its rewards are zero: see `whiten_advantages`.
    bootstrap_on_success: treats success like a time limit: the value of the
      final observation counts, so that an early success loses no reward. Other
      terminations, such as failures, still end the return.
    importance_bound: `weight, importance_cap -> weight` of the loss of each
      step. Steps have weights where acting rounds log-probabilities in another
      way than learning, as in bfloat16; see `rollout_correction`.
    importance_cap: bound of the weights.
    init_from: folder of an exported policy to start from; its observation
      statistics then stay fixed. None for random parameters.
    eval_env: environments for evaluation, which a simulator needs apart from
      those it trains in; `env` if None.
  """
  policy = policy(env)
  act = rollout.rollout(policy, env, num_steps)
  rescore = rollout_correction.in_environments(policy)
  count_episodes = stages.Stage(episode_stats.update, 'episode_stats')
  estimate = stages.Stage(
    functools.partial(
      compute_advantages, policy, discount, gae_lambda, bootstrap_on_success
    ),
    'compute_advantages',
    unbatched=(0, 1),
    rounds=policy.rounds,
  )
  measure = stages.Stage(describe, 'measure', 'sum')
  whiten = stages.Stage(whiten_advantages, 'whiten', 'batch')
  flatten = stages.Stage(flatten_time, 'flatten_time', 'batch')
  minibatch = minibatches.minibatches('shuffled', num_minibatches, num_epochs)
  loss = objective(
    policy,
    clip=loss_terms.Clip(clip_low, clip_high, dual_clip),
    importance=loss_terms.Importance(
      bound=importance_bound, cap=importance_cap
    ),
    value=loss_terms.ValueLoss(value_coef, value_clip, value_huber),
    entropy_coef=entropy_coef,
  )
  learn = train_step.learner(
    loss, optimizer, unbatched=(0, 1), target_kl=target_kl
  )
  update_obs_stats = embodied.update_obs_stats(
    env, normalize_obs and init_from is None
  )

  def init(key):
    policy_key, env_key = jax.random.split(key)
    params, stats = embodied.init(
      policy, env, policy_key, normalize_obs, init_from
    )
    actor = train_step.init(params, optimizer)
    return State(actor, stats, *embodied.reset(env, num_envs, env_key))

  def step(state: State, batch, key):
    del batch  # The environments are the data.
    params, stats = state.actor.params, state.obs_stats
    keys = stages.keys(key, state.obs)
    env_state, obs, x, timestep = act(
      params, stats, state.env_state, state.obs, keys
    )
    episodes, ended = count_episodes(state.episodes, timestep)
    x = x._replace(**estimate(params, stats, x, timestep))
    x, gap_info = rescore(params, stats, x)
    rollout_info = measure(x, timestep._replace(final_obs=()), ended) | gap_info
    if normalize_advantages:
      whitened = whiten(x.advantage, x.mask, x.reward, x.steps)
      x = x._replace(advantage=whitened)
    x = flatten(x)
    actor, info = learn(state.actor, minibatch(key, x.mask, x), stats)
    stats = update_obs_stats(stats, x.obs)
    return State(actor, stats, env_state, obs, episodes), rollout_info | info

  return embodied.workflow(init, step, policy, eval_env or env)


def compute_advantages(
  policy,
  discount,
  gae_lambda,
  bootstrap_on_success,
  params,
  stats,
  x: base.Experience,
  timestep: env_lib.TimeStep,
) -> dict[str, Any]:
  """Advantages and returns of [B, T] steps, as fields of the experience.

  They are those of steps, or [B, T, Z], of each action of a chunk, as the
  policy's values are. The value after the last action of a truncated episode is
  that of its final observation, never of the next episode's first.
  """
  value = policy.value(params, obs_stats.normalize(stats, x.obs))
  final_value = policy.value(
    params, obs_stats.normalize(stats, timestep.final_obs)
  )
  if value.ndim == x.mask.ndim:
    reward, next_value, is_last = timestep.reward, final_value, 1.0
    steps = 1.0 if timestep.steps is None else timestep.steps
    of_step = lambda y: y
  else:
    reward, next_value, is_last = _by_action(timestep, value, final_value)
    steps = 1.0
    of_step = lambda y: y[..., None]
  discount = discount**steps * jnp.ones_like(value)
  ends = timestep.terminated
  if bootstrap_on_success:
    ends = ends * (1.0 - timestep.success)
  discount *= 1.0 - of_step(ends) * is_last
  ended = jnp.maximum(timestep.terminated, timestep.truncated)
  continue_ = 1.0 - of_step(ended) * is_last
  mask = x.mask
  if timestep.env_failed is not None:
    # A failed step teaches nothing: reward := value makes its δ exactly zero.
    mask *= 1.0 - timestep.env_failed
    failed = of_step(timestep.env_failed > 0)
    reward = jnp.where(failed, value, reward)
    discount = jnp.where(failed, 0.0, discount)
    next_value = jnp.where(failed, 0.0, next_value)
  gae = jax.vmap(functools.partial(advantages.gae, lambda_=gae_lambda))
  in_order = (
    y.reshape(len(y), -1)
    for y in (reward, value, next_value, discount, continue_)
  )
  advantage = gae(*in_order).reshape(value.shape)
  return {
    'mask': mask,
    'truncated': timestep.truncated,
    'advantage': advantage,
    'reward': reward,
    'value': value,
    'next_value': next_value,
    'discount': discount,
    'continue_': continue_,
    'return_': advantage + value,
    'steps': timestep.steps,
  }


def _by_action(timestep: env_lib.TimeStep, value, final_value):
  """Reward, next value, and whether it ends its chunk, of each action.

  Args:
    timestep: of [B, T] steps.
    value: [B, T, Z], before each action, all estimated before the first.
    final_value: those of the observation after the chunk, of which the first is
      the value of the observation itself.

  Returns:
    Three arrays [B, T, Z]. Of actions that were not executed, they are finite.
  """
  reward, steps = timestep.action_reward, timestep.steps
  if reward is None:
    reward, steps = timestep.reward[..., None], jnp.ones_like(timestep.reward)
  after_chunk = final_value[..., :1]
  later = jnp.concatenate([value[..., 1:], after_chunk], -1)
  z = jnp.arange(value.shape[-1]).reshape((1,) * steps.ndim + (-1,))
  is_last = z == steps[..., None] - 1
  next_value = jnp.where(is_last, after_chunk, later)
  return reward, next_value, is_last.astype(value.dtype)


def whiten_advantages(advantage, mask, reward, steps=None):
  """Whitens advantages, unless no step of the batch has a reward.

  Where success is rare and the only reward, advantages of a batch without it
  are errors of the critic. Whitening would make them as large as any others, so
  they stay as they are.

  Args:
    advantage: [B, T], or [B, T, Z], from rewards and values.
    mask: 1 for steps that are learned from.
    reward: as `advantage`.
    steps: actions of each step that were executed; None for all.
  """
  mask = granularity.executed(mask, steps, advantage)
  rewarded = (reward * mask != 0.0).any()
  return jnp.where(rewarded, advantages.whiten(advantage, mask), advantage)


def flatten_time(x: base.Experience) -> base.Experience:
  """Makes every step a row, [B, T] to [B · T], of what the loss reads."""
  x = x._replace(
    reward=None, next_value=None, discount=None, continue_=None, truncated=None
  )
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def objective(
  policy: base.Policy,
  *,
  clip: loss_terms.Clip = loss_terms.Clip(),
  importance: loss_terms.Importance = loss_terms.Importance(),
  value: loss_terms.ValueLoss = loss_terms.ValueLoss(),
  entropy_coef: float = 0.0,
) -> Callable:
  """Returns the loss `params, obs_stats, experience -> Loss` of `embodied_ppo`.

  Args:
    policy: the policy, with a critic.
    clip: range of the ratio.
    importance: weights of steps whose sampling rounds otherwise.
    value: the critic's loss.
    entropy_coef: weight of the entropy bonus.
  """
  if value.clip is not None and value.huber is not None:
    raise ValueError(
      'The critic has one loss: give value_clip or value_huber, not both.'
    )

  clipped = objectives.surrogate(clip, importance)

  def critic_loss(predicted, x: base.Experience):
    if value.clip is not None:
      return losses.value_clip(predicted, x.value, x.return_, value.clip)
    if value.huber is not None:
      return losses.huber(predicted, x.return_, value.huber)
    return 0.5 * (predicted - x.return_) ** 2

  def loss(params, stats, x: base.Experience):
    obs = obs_stats.normalize(stats, x.obs)
    now = policy.evaluate(params, obs, x.action)
    value_loss, rows = critic_loss(now.value, x), granularity.by_row(x)
    now, mask = granularity.evaluation_by_row(now, rows), rows.mask
    policy_loss, ratio_info = clipped(now.logp, rows)
    total = policy_loss - entropy_coef * now.entropy
    # One mean: another denominator would double the memory of gradients.
    total += value.coef * granularity.spread(value_loss, total)
    old_logp = rollout_correction.old_logp(rows)
    kl = metrics.mean(losses.kl_k3(old_logp, now.logp), mask)
    info = ratio_info | {
      'train/policy_loss': metrics.mean(policy_loss, mask),
      'train/value_loss': metrics.mean(
        value_loss, granularity.executed(x.mask, x.steps, value_loss)
      ),
      'train/entropy': metrics.mean(now.entropy, mask),
      'train/kl_behavior': metrics.mean(
        losses.kl_k3(rows.logp, now.logp), mask
      ),
    }
    return train_step.Loss((losses.token_mean(total, mask),), info, kl)

  return loss


def describe(
  x: base.Experience,
  timestep: env_lib.TimeStep,
  ended: episode_stats.EpisodeStats,
) -> base.Info:
  """Metrics of a rollout, and of the episodes that ended in it."""
  steps = 1.0 if timestep.steps is None else timestep.steps
  mask = granularity.executed(x.mask, x.steps, x.value)
  return (
    episode_stats.metrics(ended, 'env')
    | episode_stats.failures(timestep)
    | {
      'rollout/reward': metrics.moments(x.reward, mask),
      'train/explained_variance': metrics.explained_variance(
        x.value, x.return_, mask
      ),
      'env/steps': (steps * x.mask).sum(),
    }
  )
