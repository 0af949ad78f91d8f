"""Group relative policy optimization in environments, arXiv:2402.03300.

Episodes with the same initial state are compared with each other, as in
RLinf-VLA (arXiv:2510.06710): one advantage an episode, or one a step from the
rewards of it and of later ones. Steps after the end of an episode do not count.
"""

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

EpisodeReward = Callable[[episode_stats.EpisodeStats], jax.Array]
"""`stats -> reward_B`: the reward of each row's first episode."""


class State(NamedTuple):
  """State carried from step to step; environments are reset in every one.

  Attributes:
    actor: the policy being trained.
    obs_stats: running moments of observations; `()` if not normalized.
    reference: initial parameters and statistics; `()` where there is no KL
      term.
  """

  actor: base.TrainState
  obs_stats: Any
  reference: Any


def embodied_grpo(
  env: env_lib.Env,
  policy: Callable[[env_lib.Env], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: ranges.PositiveInt,
  group_size: ranges.PositiveInt = 8,
  num_steps: ranges.PositiveInt | None = None,
  episode_reward: EpisodeReward = episode_stats.success,
  clip_low: ranges.NonNegativeFloat = 0.2,
  clip_high: ranges.NonNegativeFloat = 0.2,
  dual_clip: ranges.AboveOne | None = None,
  kl_coef: ranges.NonNegativeFloat = 0.0,
  kl_estimator: signatures.KlEstimator = losses.kl_k3,
  entropy_coef: float = 0.0,
  num_minibatches: ranges.PositiveInt = 1,
  num_epochs: ranges.PositiveInt = 1,
  filter_groups: bool = False,
  advantage: signatures.GroupAdvantage = advantages.group_relative,
  turn_advantage: signatures.TurnAdvantage | None = None,
  aggregate: signatures.Aggregate = losses.sequence_mean_token_mean,
  importance_weight: signatures.ImportanceWeight = losses.token_weight,
  importance_bound: signatures.ImportanceBound = losses.truncated,
  importance_cap: ranges.AtLeastOne = 2.0,
  normalize_obs: bool = True,
  init_from: str | None = None,
  eval_env: env_lib.Env | None = None,
) -> base.Workflow:
  """Runs an episode in every environment and compares those of a group.

  Args:
    env: environments to act in. Adjacent environments form groups and share
      their task and their seed, which must begin the same episode in each.
    policy: makes the policy for an environment's observations and actions.
    optimizer: optimizer of the parameters.
    num_envs: number of environments.
    group_size: environments that share their initial state.
    num_steps: steps of each environment; the horizon of `env` if None.
    episode_reward: `episode_stats.EpisodeStats -> reward_B`: the reward of each
      episode, `episode_stats.success` or `episode_stats.episode_return`.
    clip_low: how far the probability ratio may fall below 1.
    clip_high: how far it may rise above 1.
    dual_clip: bound of the loss where the advantage is negative; None for none.
    kl_coef: weight of the KL to the initial policy; 0 keeps no copy of it.
    kl_estimator: `logp, ref_logp -> KL`, for each log-probability.
    entropy_coef: weight of the entropy bonus.
    num_minibatches: minibatches of a batch, with an update each.
    num_epochs: passes over each batch, shuffled anew in each.
    filter_groups: masks groups whose episodes all have the same reward. One
      advantage an episode is zero there in any case, but `kl_coef` and
      `entropy_coef` act on them, and they count where `aggregate` averages over
      steps. With `turn_advantage`, it leaves out advantages that are not zero.
    advantage: `reward_G -> advantage_G` of one group.
    turn_advantage: `reward_GK, taken_GK, state_GK -> advantage_GK`: the
      advantages of the K steps of one group of episodes, from the rewards of
      the environment, in place of `advantage` of `episode_reward`; such as
      `turn_advantages.by_turn`, which compares steps of the same number. Only
      the states of first steps are known to be equal. None for one advantage an
      episode.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`: the mean of the losses of
      all steps, or of all their tokens or actions where the policy has
      log-probabilities of these (`granularity`), such as `losses.token_mean`.
    importance_weight: `proximal_logp, behavior_logp, mask -> weight` of each
      loss. There are weights where acting rounds log-probabilities in another
      way than learning, as in bfloat16; see `rollout_correction`.
    importance_bound: `weight, importance_cap -> weight`.
    importance_cap: bound of the weights.
    normalize_obs: whether observations are normalized by running moments.
    init_from: folder of an exported policy to start from; its observation
      statistics then stay fixed. None for random parameters.
    eval_env: environments for evaluation; `env` if None, as every step resets
      them.
  """
  _check_groups(env, num_envs, group_size)
  policy = policy(env)
  draw_seeds = rollout.draw_seeds(num_envs // group_size, group_size)
  reset = rollout.reset(env)
  act = rollout.rollout(
    policy, env, num_steps or env.horizon, keep_final_obs=False
  )
  estimate = _estimator(
    group_size, episode_reward, advantage, filter_groups, turn_advantage
  )
  measure = stages.Stage(
    functools.partial(describe, group_size, episode_reward),
    'measure',
    'sum',
    group_size=group_size,
  )
  minibatch = minibatches.minibatches(
    'shuffled', num_minibatches, num_epochs, group_size
  )
  loss = objective(
    policy,
    clip=loss_terms.Clip(clip_low, clip_high, dual_clip),
    kl=loss_terms.KlPenalty(kl_coef, kl_estimator),
    entropy_coef=entropy_coef,
    aggregate=aggregate,
    importance=loss_terms.Importance(
      importance_weight, importance_bound, importance_cap
    ),
  )
  rescore = rollout_correction.in_environments(policy)
  logp_of_steps = functools.partial(rollout_correction.logp_of_steps, policy)
  score_ref = stages.Stage(
    logp_of_steps, 'ref_logp', unbatched=(0, 1), rounds=policy.rounds
  )
  update_obs_stats = embodied.update_obs_stats(
    env, normalize_obs and init_from is None
  )
  learn = train_step.learner(loss, optimizer, unbatched=(0, 1))

  def init(key):
    params, stats = embodied.init(policy, env, key, normalize_obs, init_from)
    actor = train_step.init(params, optimizer)
    return State(actor, stats, (params, stats) if kl_coef else ())

  def step(state: State, batch, key):
    del batch  # The environments are the data.
    actor, stats = state.actor, state.obs_stats
    seed_B = draw_seeds(key)
    env_state, obs = reset(seed_B)
    keys = stages.keys(key, seed_B)
    *_, x, timestep = act(actor.params, stats, env_state, obs, keys)
    x = x._replace(**estimate(timestep), truncated=None)
    x, gap_info = rescore(actor.params, stats, x)
    rollout_info = measure(timestep) | gap_info
    ref = score_ref(*state.reference, x.obs, x.action) if kl_coef else ()
    actor, info = learn(actor, minibatch(key, seed_B, x, ref), stats)
    stats = update_obs_stats(stats, x.obs)
    return State(actor, stats, state.reference), rollout_info | info

  return embodied.workflow(init, step, policy, eval_env or env)


def _check_groups(env: env_lib.Env, num_envs: int, group_size: int):
  if num_envs % group_size:
    raise ValueError(
      f'{num_envs} environments cannot be split into groups of {group_size}: '
      'make `num_envs` a multiple of `group_size`.'
    )
  if env.tasks and env.task_group_size % group_size:
    raise ValueError(
      f'Episodes are compared in groups of {group_size}, and of the '
      f'{len(env.tasks)} tasks of the environments, '
      f'{env.task_group_size} adjacent ones have the same: bind the '
      f'`group_size` of `env` to {group_size}, too, so that all episodes of a '
      'group are of one task.'
    )


def _estimator(
  group_size, episode_reward, advantage, filter_groups, turn_advantage
) -> stages.Stage:
  """The stage `TimeStep -> mask and advantage`, see `group_advantage`."""
  return stages.Stage(
    functools.partial(
      group_advantage,
      group_size,
      episode_reward,
      advantage,
      filter_groups,
      turn_advantage=turn_advantage,
    ),
    'group_advantage',
    group_size=group_size,
  )


def objective(policy: base.Policy, **settings) -> Callable:
  """Returns the loss `params, obs_stats, experience, ref_logp -> Loss`.

  Args:
    policy: the policy.
    **settings: of `objectives.policy`.
  """

  def evaluate(params, x: base.Experience):
    now = policy.evaluate(params, x.obs, x.action)
    return granularity.evaluation_by_row(now, x)

  loss = objectives.policy(evaluate, **settings)

  def run(params, stats, x: base.Experience, ref_logp):
    x = granularity.by_row(x._replace(obs=obs_stats.normalize(stats, x.obs)))
    ref_logp = jax.tree.map(lambda lp: lp.reshape(x.logp.shape), ref_logp)
    return loss(params, x, ref_logp)

  return run


def group_advantage(
  group_size: int,
  episode_reward: EpisodeReward,
  advantage: signatures.GroupAdvantage,
  filter_groups: bool,
  timestep: env_lib.TimeStep,
  *,
  turn_advantage: signatures.TurnAdvantage | None = None,
) -> dict[str, Any]:
  """Masks and advantages of [B, T] steps, as fields of the experience.

  No step counts of an episode whose simulator failed; its group is compared as
  if its reward were their mean, and single steps are compared without it.
  """
  reward_NG, kept_NG, least_N1, most_N1 = _groups(
    group_size, episode_reward, timestep
  )
  first_BT = episode_stats.in_first_episode(timestep)
  if turn_advantage is None:
    filled_NG = jax.vmap(advantages.fill_rewards)(reward_NG, kept_NG)
    advantage_NG = jax.vmap(advantage)(filled_NG)
    advantage_BT = advantage_NG.reshape(-1, 1) * first_BT
  else:
    advantage_BT = _by_step(
      turn_advantage,
      group_size,
      timestep.reward,
      first_BT * kept_NG.reshape(-1, 1),
    )
  if filter_groups:
    kept_NG *= most_N1 > least_N1
  mask_BT = first_BT * kept_NG.reshape(-1, 1)
  return {
    'mask': mask_BT,
    'advantage': jnp.where(mask_BT > 0, advantage_BT, 0.0),
    'steps': timestep.steps,
  }


def _by_step(
  advantage: signatures.TurnAdvantage, group_size: int, reward_BT, taken_BT
):
  """Advantages of steps, [B, T], each of which is a turn of its episode."""
  B, T = reward_BT.shape
  # Number of the state: 0 of all first steps, and another of any other step.
  state_GT = jnp.arange(group_size * T).reshape(group_size, T).at[:, 0].set(0)

  def of_group(reward_GT, taken_GT):
    reward_GT = jnp.where(taken_GT > 0, reward_GT, 0.0)
    # `advantage` may compare whole episodes, by the sums of rows: a failed one
    # gets the mean of the others.
    return_G = advantages.fill_rewards(reward_GT.sum(1), taken_GT[:, 0])
    first_G = jnp.where(taken_GT[:, 0] > 0, reward_GT[:, 0], return_G)
    reward_GT = reward_GT.at[:, 0].set(first_G)
    return advantage(reward_GT, taken_GT, state_GT)

  groups = (x.reshape(-1, group_size, T) for x in (reward_BT, taken_BT))
  return jax.vmap(of_group)(*groups).reshape(B, T)


def describe(
  group_size: int, episode_reward: EpisodeReward, timestep: env_lib.TimeStep
) -> base.Info:
  """Metrics of first episodes; `env/steps` counts all steps that were made."""
  reward_NG, kept_NG, least_N1, most_N1 = _groups(
    group_size, episode_reward, timestep
  )
  steps = jnp.ones_like(timestep.reward)
  if timestep.steps is not None:
    steps = timestep.steps
  if timestep.env_failed is not None:
    steps = steps * (1.0 - timestep.env_failed)
  return (
    episode_stats.metrics(episode_stats.first_episode(timestep), 'env')
    | episode_stats.failures(timestep)
    | {
      'rollout/reward': metrics.moments(reward_NG, kept_NG),
      'rollout/groups_degenerate': metrics.mean(
        (most_N1 <= least_N1)[:, 0].astype(reward_NG.dtype), kept_NG.max(1)
      ),
      'env/steps': steps.sum(),
    }
  )


def _groups(
  group_size: int, episode_reward: EpisodeReward, timestep: env_lib.TimeStep
):
  """Rewards, which episodes did not fail, and each group's least and most."""
  ended = episode_stats.first_episode(timestep)
  reward_NG = episode_reward(ended).reshape(-1, group_size)
  kept_NG = ended.count.reshape(-1, group_size)
  least_N1 = jnp.where(kept_NG > 0, reward_NG, jnp.inf).min(1, keepdims=True)
  most_N1 = jnp.where(kept_NG > 0, reward_NG, -jnp.inf).max(1, keepdims=True)
  return reward_NG, kept_NG, least_N1, most_N1
