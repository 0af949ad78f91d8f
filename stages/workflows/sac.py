"""Soft actor-critic in worlds, arXiv:1812.05905, and RLPD, arXiv:2302.02348."""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics
from stages.envs import episode_stats, obs_stats, rollout
from stages.envs import evaluate as evaluate_lib
from stages.envs import replay as replay_lib
from stages.learn import soft_actor_critic, train_step
from stages.models import critics as critics_lib


class State(NamedTuple):
  """What a step of SAC reads and rewrites.

  Attributes:
    actor: the policy, and the log of the temperature.
    critic: the critics.
    target: the critics of a while ago: an average of what they were.
    replay: what was done.
    offline_data: transitions recorded before training; `()` without any.
    obs_stats: moments of all that was seen; nothing where none are kept.
    env_state: the state of the environments, or their tokens.
    obs: what is seen in them.
    episodes: how the episodes go that have not ended.
    step: steps so far.
  """

  actor: base.TrainState
  critic: base.TrainState
  target: base.Params
  replay: replay_lib.Replay
  offline_data: replay_lib.Transition | tuple[()]
  obs_stats: Any
  env_state: Any
  obs: Any
  episodes: episode_stats.Running
  step: jax.Array


def sac(
  env: base.Env,
  policy: Callable[..., base.Policy],
  critic: Callable[[base.Env], critics_lib.Critic],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: int,
  num_steps: int,
  capacity: int,
  batch_size: int = 256,
  utd_ratio: float = 1.0,
  actor_update_period: int = 1,
  learning_starts: int = 1,
  discount: float = 0.99,
  tau: float = 0.005,
  init_temperature: float = 1.0,
  target_entropy: float | None = None,
  critic_subset: int | None = None,
  offline_data: str | None = None,
  normalize_obs: bool = True,
  bootstrap_on_success: bool = False,
  eval_env: base.Env | None = None,
) -> base.Workflow:
  """Acts for some steps in environments, and learns from all that was done.

  Args:
    env: to act in.
    policy: makes the policy to train from what a world shows and takes; it is
      asked for actions that are squashed, for a deviation that depends on what
      is seen, and for no critic of its own.
    critic: makes the critics, likewise.
    optimizer: how gradients become updates, of the actor and of the critics:
      its schedule counts those that each of them makes once it has warmed up.
    num_envs: environments.
    num_steps: steps in each, between updates.
    capacity: steps that are remembered.
    batch_size: of them, those of a minibatch.
    utd_ratio: updates of the critics for every step of an environment.
    actor_update_period: updates of the critics for one of the actor; RLPD has
      all of a step.
    learning_starts: first steps (of `num_envs` × `num_steps` transitions) in
      which actions are uniform and nothing is learned.
    discount: γ, a step.
    tau: τ, how much of the critics the average takes at an update.
    init_temperature: α at the beginning.
    target_entropy: H, which α is to bring the policy's to, in nats; −dim(A) if
      None, where the range of each dimension of a command is −1 … 1.
    critic_subset: critics drawn anew for every update, the least of which is
      the target; the actor then maximizes the mean of all critics, as in REDQ
      and RLPD. None: the least of all critics for both, as in SAC.
    offline_data: file of transitions that half of each minibatch is drawn from
      (`stages.envs.replay.write`); None for no such file.
    normalize_obs: whether observations are put on a scale of their own.
    bootstrap_on_success: takes success, too, for an end that time has set, so
      that whoever is done early loses nothing by it.
    eval_env: the world in which the policy is judged: a simulator needs another
      than it trains in. `env` if None.
  """
  critic = critic(env)
  policy = policy(env, bounding='tanh', state_dependent_std=True, critic=False)
  like = _like(policy, env)
  if offline_data and len(like.env_action.shape) > 1:
    raise ValueError(
      'A file of demonstrations does not say how many steps of a chunk were '
      'made, so what follows one cannot be discounted: leave out '
      '`offline_data`, or decide one step at a time.'
    )
  n = updates(utd_ratio, num_envs * num_steps, actor_update_period)
  if target_entropy is None:
    target_entropy = default_target_entropy(env, like.env_action)
  act = rollout.rollout(at_random(policy), env, num_steps)
  begin = stages.Stage(
    lambda step: (step < learning_starts, step + 1), 'warmup', 'batch'
  )
  count = stages.Stage(episode_stats.update, 'episode_stats')
  measure = stages.Stage(describe, 'measure', 'sum')
  recall = stages.Stage(
    functools.partial(
      remember, policy, discount, n, batch_size, always=bootstrap_on_success
    ),
    'replay',
    'batch',
    consumes=(0,),
  )
  see = stages.Stage(
    lambda obs: obs_stats.from_batch(obs, env.obs_spec), 'obs_moments', 'sum'
  )
  widen = stages.Stage(lambda a, b: a.merge(b), 'update_obs_stats', 'batch')
  learn = soft_actor_critic.learner(
    (policy, critic, optimizer),
    *(n, actor_update_period, tau, critic_subset, target_entropy),
  )
  attempt = evaluate_lib.evaluator(policy, eval_env or env)

  def init(key):
    luck, theirs, seeds = jax.random.split(key, 3)
    seed_B = jax.random.randint(
      seeds, (num_envs,), 0, jnp.iinfo(jnp.int32).max, jnp.int32
    )
    ours = {
      'policy': policy.init(luck),
      'log_temperature': jnp.log(jnp.full((), init_temperature, float)),
    }
    params = critic.init(theirs)
    return State(
      train_step.init(ours, optimizer),
      train_step.init(params, optimizer),
      params,
      replay_lib.empty(like, capacity),
      replay_lib.read(offline_data, like, discount, bootstrap_on_success)
      if offline_data
      else (),
      obs_stats.init(env.obs_spec) if normalize_obs else (),
      *rollout.init(env, seed_B),
      episode_stats.init(num_envs),
      jnp.zeros((), jnp.int32),
    )

  def step(state: State, batch, key):
    del batch  # All there is to know is in the environments.
    actor, scale = state.actor, state.obs_stats
    warm, steps = begin(state.step)
    keys = stages.keys(key, state.obs)
    env_state, obs, x, timestep = act(
      (actor.params['policy'], warm), scale, state.env_state, state.obs, keys
    )
    episodes, ended = count(state.episodes, timestep)
    measured = measure(timestep._replace(final_obs=()), ended)
    if normalize_obs:
      scale = widen(scale, see(x.obs))
    kept, sample, filled = recall(
      state.replay, state.offline_data, x, timestep, key
    )
    actor, critics, info = learn(
      *(actor, (state.critic, state.target), scale, warm, sample, key)
    )
    return State(
      *(
        actor,
        *critics,
        kept,
        state.offline_data,
        scale,
        env_state,
        obs,
        episodes,
        steps,
      )
    ), measured | filled | info

  def evaluate(state: State, seed, key):
    params = state.actor.params['policy']
    return attempt(params, state.obs_stats, seed, key)

  def params(state: State):
    return {
      'policy': state.actor.params['policy'],
      'obs_stats': state.obs_stats,
    }

  return base.Workflow(init, step, evaluate, params, score='eval/success_once')


def updates(utd: float, steps: int, delay: int) -> int:
  """Updates of the critics in a step of so many steps of environments."""
  n = round(utd * steps)
  if n < 1 or abs(n - utd * steps) > 1e-6 or n % delay:
    raise ValueError(
      f'{utd} updates for each of {steps} steps of environments are '
      f'{utd * steps:g}, which must be a whole number of at least 1, and a '
      f'multiple of the {delay} for one of the actor.'
    )
  return n


def at_random(policy: base.Policy) -> base.Policy:
  """The policy whose `params` are a pair: its own, and whether to ignore them.

  If so, every command within the bounds is as likely.
  """

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    params, warm = params
    x = policy.act(params, obs, key_B, group_size=group_size, greedy=greedy)
    shape = x.action.shape[1:]
    draw = lambda key: jax.random.uniform(key, shape, x.action.dtype, -1, 1)
    # What tanh brings back, but for the very ends.
    any_BA = jnp.arctanh((1.0 - 1e-6) * jax.vmap(draw)(key_B))
    return x._replace(action=jnp.where(warm, any_BA, x.action))

  return policy._replace(act=act)


def remember(
  policy, discount, n, batch, kept, prior, x, timestep, key, *, always=False
):
  """Puts a batch of steps into the replay, and draws `n` minibatches from it.

  What follows the last step of an episode that time has ended is what was seen
  then, and counts; only termination ends what there is to expect, and not that
  if what follows counts `always`. What a simulator has lost is not remembered.
  """
  steps = jnp.ones_like(timestep.reward)
  if timestep.steps is not None:
    steps = timestep.steps
  ends = 0.0 if always else timestep.terminated
  new = replay_lib.Transition(
    x.obs,
    policy.to_env_action(x.action),
    timestep.reward,
    discount**steps * (1.0 - ends),
    timestep.final_obs,
  )
  mask = x.mask if timestep.env_failed is None else 1.0 - timestep.env_failed
  # What was done first is first overwritten.
  new, mask = jax.tree.map(
    lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), (new, mask)
  )
  kept = replay_lib.put(kept, new, mask)
  sample = replay_lib.draw(kept, prior, key, n, batch)
  Y = jax.tree.leaves(kept.rows)[0].shape[0]
  share = kept.filled.astype(timestep.reward.dtype)
  filled = metrics.Mean(share, jnp.full_like(share, Y))
  return kept, sample, {'replay/filled': filled}


def describe(
  timestep: base.TimeStep, ended: episode_stats.EpisodeStats
) -> base.Info:
  """What is worth knowing of a rollout."""
  mask = jnp.ones_like(timestep.reward)
  if timestep.env_failed is not None:
    mask -= timestep.env_failed
  steps = mask if timestep.steps is None else timestep.steps * mask
  return (
    episode_stats.metrics(ended, 'env')
    | episode_stats.failures(timestep)
    | {
      'rollout/reward': metrics.moments(timestep.reward, mask),
      'env/steps': steps.sum(),
    }
  )


def _like(policy: base.Policy, env: base.Env) -> replay_lib.Transition:
  """One transition, as shapes."""

  def decide(key):
    obs = jax.tree.map(
      lambda x: jnp.zeros((1, *x.shape), x.dtype), env.obs_spec
    )
    x = policy.act(policy.init(key), obs, key[None])
    return policy.to_env_action(x.action)[0]

  command = jax.eval_shape(decide, jax.random.key(0))
  number = jax.ShapeDtypeStruct((), jnp.result_type(float))
  return replay_lib.Transition(
    env.obs_spec, command, number, number, env.obs_spec
  )


def default_target_entropy(env: base.Env, command) -> float:
  """−1 for each dimension, as if its range were −1 … 1."""
  A = math.prod(command.shape)
  half = [
    0.5 * (b - a) for a, b in zip(env.action_low, env.action_high, strict=True)
  ]
  return -A + A // len(half) * sum(map(math.log, half))
