"""Group relative policy optimization in worlds, arXiv:2402.03300.

Episodes that begin alike are compared with each other, as RLinf-VLA does
(arXiv:2510.06710): one advantage an episode, and nothing after its end.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.envs import episode_stats, obs_stats, rollout
from stages.envs import evaluate as evaluate_lib
from stages.envs import rollout as rollout_lib
from stages.learn import advantages, losses, minibatches, train_step
from stages.models import policy_file
from stages.workflows.grpo import objective


class State(NamedTuple):
  """What a step reads and rewrites: of environments nothing is left over.

  Attributes:
    actor: what learns.
    obs_stats: moments of all that was seen; nothing where none are kept.
    reference: what it began as, parameters and scale; nothing where none is
      used.
  """

  actor: base.TrainState
  obs_stats: Any
  reference: Any


def embodied_grpo(
  env: base.Env,
  policy: Callable[[base.Env], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: int,
  group_size: int = 8,
  num_steps: int | None = None,
  episode_reward: Callable = episode_stats.success,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: Callable = losses.kl_k3,
  entropy_coef: float = 0.0,
  num_minibatches: int = 1,
  num_epochs: int = 1,
  filter_groups: bool = False,
  advantage: Callable = advantages.group_relative,
  aggregate: Callable = losses.sequence_mean_token_mean,
  normalize_obs: bool = True,
  init_from: str | None = None,
  eval_env: base.Env | None = None,
) -> base.Workflow:
  """Makes one attempt in every environment, and compares those of a group.

  Args:
    env: to act in. Rows of a group are next to each other, and the seed that
      they share shall begin the same episode in all of their environments.
    policy: makes the policy to train from what a world shows and takes.
    optimizer: how gradients become updates.
    num_envs: environments.
    group_size: of them, those that begin alike.
    num_steps: steps of an attempt; the most that an episode has if None.
    episode_reward: `episode_stats.EpisodeStats -> reward_B`: what an episode
      was worth, `episode_stats.success` or `episode_stats.episode_return`.
    clip_low: how far the probability ratio may fall.
    clip_high: how far it may rise.
    dual_clip: limit of the loss where the advantage is negative; None for none.
    kl_coef: weight of the pull towards the policy it began as; 0 keeps no copy.
    kl_estimator: `logp, ref_logp -> KL`, step by step: how that is estimated.
    entropy_coef: weight of the entropy bonus.
    num_minibatches: minibatches of a batch, each an optimizer step.
    num_epochs: how often a batch is learned from, in another order each time.
    filter_groups: masks groups of which all did equally well. Their advantage
      is zero in any case, but `kl_coef` and `entropy_coef` act on them, and
      they count where `aggregate` averages over steps.
    advantage: `return_G -> advantage_G` of one group.
    aggregate: `loss_BT, mask_BT -> metrics.Mean`.
    normalize_obs: whether observations are put on a scale of their own.
    init_from: folder that a run has exported, to begin with its policy and its
      scale, which then stays as it is; None to begin from nothing.
    eval_env: the world in which the policy is judged; `env` if None, as no
      step needs what another has left there.
  """
  if num_envs % group_size:
    raise ValueError(
      f'{num_envs} environments are no whole groups of {group_size}: make '
      f'`rows` a '
      'multiple of `group_size`.'
    )
  policy = policy(env)
  loss = objective(
    *(
      policy.evaluate,
      (clip_low, clip_high, dual_clip),
      (kl_coef, kl_estimator),
    ),
    *(entropy_coef, aggregate),
  )
  draw = rollout_lib.draw_seeds(num_envs // group_size, group_size)
  reset = rollout.reset(env)
  act = rollout.rollout(policy, env, num_steps or env.horizon)
  contrast = stages.Stage(
    functools.partial(
      compare, group_size, episode_reward, advantage, filter_groups
    ),
    'group_advantage',
    group_size=group_size,
  )
  measure = stages.Stage(
    functools.partial(describe, group_size, episode_reward),
    'measure',
    'sum',
    group_size=group_size,
  )

  def score(reference, obs, action):
    params, scale = reference
    obs = obs_stats.normalize(scale, obs)
    return policy.evaluate(params, obs, action).logp

  def scaled(params, scale, x: base.Experience, ref_logp):
    obs = obs_stats.normalize(scale, x.obs)
    return loss(params, x._replace(obs=obs), ref_logp)

  refer = stages.Stage(score, 'ref_logp', unbatched=(0,))
  deal = minibatches.shuffle(num_minibatches, num_epochs, group_size)
  shuffled = minibatches.gather(group_size)
  gradient = stages.Stage(
    train_step.gradient(scaled), 'gradient', 'sum', unbatched=(0, 1)
  )
  apply = stages.Stage(train_step.apply(optimizer), 'apply', 'batch')
  fold = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos), 'merge_info', 'batch'
  )
  see = stages.Stage(
    lambda obs: obs_stats.from_batch(obs, env.obs_spec), 'obs_moments', 'sum'
  )
  widen = stages.Stage(lambda a, b: a.merge(b), 'update_obs_stats', 'batch')
  attempt = evaluate_lib.evaluator(policy, eval_env or env)

  def init(key):
    fresh = evaluate_lib.init(policy, env, normalize_obs, key)
    begun = policy_file.start(init_from, fresh)
    params, scale = begun['policy'], begun['obs_stats']
    reference = (params, scale) if kl_coef else ()
    return State(train_step.init(params, optimizer), scale, reference)

  def step(state: State, batch, key):
    del batch  # All there is to know is in the environments.
    actor, scale = state.actor, state.obs_stats
    seed = draw(key)
    env_state, obs = reset(seed)
    keys = stages.keys(key, seed)
    *_, x, timestep = act(actor.params, scale, env_state, obs, keys)
    timestep = timestep._replace(final_obs=())
    x = x._replace(**contrast(timestep), truncated=None)
    measured = measure(timestep)
    ref_logp = refer(state.reference, x.obs, x.action) if kl_coef else ()
    infos = []
    for batch in shuffled(deal(key, seed), (x, ref_logp)):
      actor, info = apply(actor, gradient(actor.params, scale, *batch))
      infos.append(info)
    info = infos[0] if len(infos) == 1 else fold(*infos)
    if normalize_obs and init_from is None:
      scale = widen(scale, see(x.obs))
    return State(actor, scale, state.reference), measured | info

  def evaluate(state: State, seed, key):
    return attempt(state.actor.params, state.obs_stats, seed, key)

  return base.Workflow(
    init, step, evaluate, evaluate_lib.policy_state, score='eval/success_once'
  )


def compare(
  group_size, episode_reward, advantage, filter_groups, timestep
) -> dict[str, Any]:
  """Which steps count, and what they were worth: fields of the experience.

  Of an episode that a simulator has lost no step counts, and its group takes it
  to have gone as the others did on average.
  """
  return_NG, kept_NG, least_N1, most_N1 = _groups(
    group_size, episode_reward, timestep
  )
  sum_N1 = (kept_NG * return_NG).sum(1, keepdims=True)
  count_N1 = kept_NG.sum(1, keepdims=True)
  # Not beyond what it is a mean of, or equals would differ by rounding.
  mean_N1 = jnp.clip(sum_N1 / jnp.maximum(count_N1, 1.0), least_N1, most_N1)
  advantage_NG = jax.vmap(advantage)(jnp.where(kept_NG > 0, return_NG, mean_N1))
  if filter_groups:
    kept_NG *= most_N1 > least_N1
  mask_BT = episode_stats.in_first_episode(timestep) * kept_NG.reshape(-1, 1)
  advantage_BT = jnp.where(mask_BT > 0, advantage_NG.reshape(-1, 1), 0.0)
  return {'mask': mask_BT, 'advantage': advantage_BT}


def describe(group_size, episode_reward, timestep) -> base.Info:
  """What is worth knowing of attempts; steps are all that were made."""
  return_NG, kept_NG, least_N1, most_N1 = _groups(
    group_size, episode_reward, timestep
  )
  steps = jnp.ones_like(timestep.reward)
  if timestep.steps is not None:
    steps = timestep.steps
  if timestep.env_failed is not None:
    steps = steps * (1.0 - timestep.env_failed)
  told = episode_stats.metrics(episode_stats.first_episode(timestep), 'env')
  return (
    told
    | episode_stats.failures(timestep)
    | {
      'rollout/reward': metrics.moments(return_NG, kept_NG),
      'rollout/groups_degenerate': metrics.mean(
        (most_N1 <= least_N1)[:, 0].astype(return_NG.dtype), kept_NG.max(1)
      ),
      'env/steps': steps.sum(),
    }
  )


def _groups(group_size: int, episode_reward, timestep):
  """Returns, which of them were not lost, and the least and most of those."""
  ended = episode_stats.first_episode(timestep)
  return_NG = episode_reward(ended).reshape(-1, group_size)
  kept_NG = ended.count.reshape(-1, group_size)
  least_N1 = jnp.where(kept_NG > 0, return_NG, jnp.inf).min(1, keepdims=True)
  most_N1 = jnp.where(kept_NG > 0, return_NG, -jnp.inf).max(1, keepdims=True)
  return return_NG, kept_NG, least_N1, most_N1
