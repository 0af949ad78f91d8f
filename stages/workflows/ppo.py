"""Proximal policy optimisation in worlds, arXiv:1707.06347."""

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
from stages.learn import advantages, losses, minibatches, train_step
from stages.models import policy_file


class State(NamedTuple):
  """What a step of PPO reads and rewrites.

  Attributes:
    actor: what learns, its critic included.
    obs_stats: moments of all that was seen; nothing where none are kept.
    env_state: the state of the environments, or their tokens.
    obs: what is seen in them.
    episodes: how the episodes go that have not ended.
  """

  actor: base.TrainState
  obs_stats: Any
  env_state: Any
  obs: Any
  episodes: episode_stats.Running


def ppo(
  env: base.Env,
  policy: Callable[[base.Env], base.Policy],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: int,
  num_steps: int,
  discount: float = 0.99,
  gae_lambda: float = 0.95,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  value_coef: float = 0.5,
  value_clip: float | None = None,
  entropy_coef: float = 0.0,
  num_minibatches: int = 4,
  num_epochs: int = 4,
  target_kl: float | None = None,
  normalize_obs: bool = True,
  normalize_advantages: bool = True,
  bootstrap_on_success: bool = False,
  init_from: str | None = None,
  eval_env: base.Env | None = None,
) -> base.Workflow:
  """Acts for some steps in many environments, and learns from them all.

  Args:
    env: to act in.
    policy: makes the policy to train from what a world shows and takes.
    optimizer: how gradients become updates.
    num_envs: environments.
    num_steps: steps in each, of a batch.
    discount: γ, a step.
    gae_lambda: λ of the advantages.
    clip_low: how far the probability ratio may fall.
    clip_high: how far it may rise.
    dual_clip: limit of the loss where the advantage is negative; None for none.
    value_coef: weight of the critic's loss.
    value_clip: how far an estimate may move at a time; None for any way.
    entropy_coef: weight of the bonus for entropy.
    num_minibatches: minibatches of a batch, each an optimiser step.
    num_epochs: how often a batch is learned from, in another order each time.
    target_kl: no update follows in a step once KL(acted ‖ now) of a minibatch
      is beyond this; None for all updates. Schedules count updates that are
      made.
    normalize_obs: whether observations are put on a scale of their own.
    normalize_advantages: whether the advantages of a batch are brought to mean
      zero and variance one. Where success is rare and the only reward, a batch
      without any would have nothing but the critic's errors made as large as
      that.
    bootstrap_on_success: takes success, too, for an end that time has set, so
      that whoever is done early loses nothing by it.
    init_from: folder that a run has exported, to begin with its policy and its
      scale, which then stays as it is; None to begin from nothing.
    eval_env: the world in which the policy is judged: a simulator needs another
      than it trains in. `env` if None.
  """
  policy = policy(env)
  loss = objective(
    policy,
    (clip_low, clip_high, dual_clip),
    (value_coef, value_clip),
    entropy_coef,
  )
  act = rollout.rollout(policy, env, num_steps)
  judge = stages.Stage(
    functools.partial(
      appraise, policy, discount, gae_lambda, bootstrap_on_success
    ),
    'compute_advantages',
    unbatched=(0, 1),
  )
  count = stages.Stage(episode_stats.update, 'episode_stats')
  see = stages.Stage(
    lambda obs: obs_stats.from_batch(obs, env.obs_spec), 'obs_moments', 'sum'
  )
  widen = stages.Stage(lambda a, b: a.merge(b), 'update_obs_stats', 'batch')
  whiten = stages.Stage(advantages.whiten, 'whiten', 'batch')
  single = stages.Stage(_single, 'flatten_time', 'batch')
  measure = stages.Stage(describe, 'measure', 'sum')
  deal = minibatches.shuffle(num_minibatches, num_epochs)
  shuffled = minibatches.gather()
  gradient = stages.Stage(
    train_step.gradient(loss), 'gradient', 'sum', unbatched=(0, 1)
  )
  ready = stages.Stage(lambda id_: jnp.zeros((), bool), 'ready', 'batch')
  apply = stages.Stage(_apply(optimizer, target_kl), 'apply', 'batch')
  fold = stages.Stage(
    lambda *infos: functools.reduce(metrics.merge, infos), 'merge_info', 'batch'
  )
  attempt = evaluate_lib.evaluator(policy, eval_env or env)

  def init(key):
    luck, seeds = jax.random.split(key)
    seed_B = jax.random.randint(
      seeds, (num_envs,), 0, jnp.iinfo(jnp.int32).max, jnp.int32
    )
    fresh = evaluate_lib.init(policy, env, normalize_obs, luck)
    begun = policy_file.start(init_from, fresh)
    actor = train_step.init(begun['policy'], optimizer)
    return State(
      *(actor, begun['obs_stats']),
      *rollout.init(env, seed_B),
      episode_stats.init(num_envs),
    )

  def step(state: State, batch, key):
    del batch  # All there is to know is in the environments.
    actor, scale = state.actor, state.obs_stats
    keys = stages.keys(key, state.obs)
    env_state, obs, x, timestep = act(
      actor.params, scale, state.env_state, state.obs, keys
    )
    episodes, ended = count(state.episodes, timestep)
    x = x._replace(**judge(actor.params, scale, x, timestep))
    measured = measure(x, timestep._replace(final_obs=()), ended)
    if normalize_advantages:
      x = x._replace(advantage=whiten(x.advantage, x.mask))
    x = single(x)
    dealt = deal(key, x.mask)
    stopped, infos = ready(dealt), []
    for (batch,) in shuffled(dealt, (x,)):
      made = gradient(actor.params, scale, batch)
      actor, stopped, info = apply(actor, stopped, made)
      infos.append(info)
    info = infos[0] if len(infos) == 1 else fold(*infos)
    if normalize_obs and init_from is None:
      scale = widen(scale, see(x.obs))
    return State(actor, scale, env_state, obs, episodes), measured | info

  def evaluate(state: State, seed, key):
    return attempt(state.actor.params, state.obs_stats, seed, key)

  return base.Workflow(
    init,
    step,
    evaluate,
    evaluate_lib.policy_state,
    score='eval/success_once',
  )


def appraise(
  policy, discount, lambda_, always, params, scale, x, timestep
) -> dict[str, Any]:
  """What each step was worth: the fields of `x` that say so, by name.

  What follows the last step of an episode that time has ended is estimated from
  what was seen then, and never from the episode that comes next.
  """
  value = policy.value(params, obs_stats.normalize(scale, x.obs))
  next_value = policy.value(
    params, obs_stats.normalize(scale, timestep.final_obs)
  )
  steps = 1.0 if timestep.steps is None else timestep.steps
  discount = discount**steps * jnp.ones_like(value)
  if not always:
    discount *= 1.0 - timestep.terminated
  continue_ = 1.0 - jnp.maximum(timestep.terminated, timestep.truncated)
  reward, mask = timestep.reward, x.mask
  if timestep.env_failed is not None:
    # What was lost taught nothing: it is as good as expected, to the bit.
    mask *= 1.0 - timestep.env_failed
    reward, discount, value, next_value = (
      jnp.where(timestep.env_failed > 0, there, here)
      for there, here in (
        (value, reward),
        (0.0, discount),
        (value, value),
        (0.0, next_value),
      )
    )
  gae = jax.vmap(functools.partial(advantages.gae, lambda_=lambda_))
  advantage = gae(reward, value, next_value, discount, continue_)
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
  }


def _single(x: base.Experience) -> base.Experience:
  """Every step a row of its own, with what is learned from."""
  x = x._replace(
    reward=None, next_value=None, discount=None, continue_=None, truncated=None
  )
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def objective(policy, clip, critic, entropy) -> Callable:
  """What `ppo` minimises: `params, scale, experience -> means, info`."""
  weight, near = critic

  def loss(params, scale, x: base.Experience):
    obs = obs_stats.normalize(scale, x.obs)
    now = policy.evaluate(params, obs, x.action)
    policy_loss = losses.ppo_clip(now.logp, x.logp, x.advantage, *clip)
    if near is None:
      value_loss = 0.5 * (now.value - x.return_) ** 2
    else:
      value_loss = losses.value_clip(now.value, x.value, x.return_, near)
    total = policy_loss + weight * value_loss - entropy * now.entropy
    ratio = losses.ratio(now.logp, x.logp)
    clipped = losses.clip_fraction(now.logp, x.logp, x.advantage, *clip[:2])
    info = {
      'train/policy_loss': metrics.mean(policy_loss, x.mask),
      'train/value_loss': metrics.mean(value_loss, x.mask),
      'train/entropy': metrics.mean(now.entropy, x.mask),
      'train/kl_behavior': metrics.mean(losses.kl_k3(x.logp, now.logp), x.mask),
      'train/clip_fraction': metrics.mean(clipped, x.mask),
      'train/ratio_mean': metrics.mean(ratio, x.mask),
      'train/ratio_max': metrics.maximum(ratio, x.mask),
    }
    return (losses.token_mean(total, x.mask),), info

  return loss


def _apply(optimizer, kl_stop) -> Callable:
  """An update, unless one before it has gone far enough."""
  update = train_step.apply(optimizer)

  def apply(actor: base.TrainState, stopped, gradient: train_step.Gradient):
    new, info = update(actor, gradient)
    if kl_stop is not None:
      kl = gradient.info['train/kl_behavior']
      stopped |= kl.sum > kl_stop * kl.count
      new = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), actor, new)
    one = jnp.ones(())
    info['train/stopped'] = metrics.Mean(stopped * one, one)
    return new, stopped, info

  return apply


def describe(
  x: base.Experience, timestep, ended: episode_stats.EpisodeStats
) -> base.Info:
  """What is worth knowing of a rollout."""
  steps = 1.0 if timestep.steps is None else timestep.steps
  return (
    episode_stats.metrics(ended, 'env')
    | episode_stats.failures(timestep)
    | {
      'rollout/reward': metrics.moments(x.reward),
      'train/explained_variance': metrics.explained_variance(
        x.value, x.return_
      ),
      'env/steps': (steps * x.mask).sum(),
    }
  )
