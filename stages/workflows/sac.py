"""Soft actor-critic in environments, arXiv:1812.05905; RLPD, arXiv:2302.02348.

The losses and updates are in `stages.learn.soft_actor_critic`.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import stages
from stages import base, metrics, ranges
from stages.envs import env as env_lib
from stages.envs import episode_stats
from stages.envs import replay as replay_lib
from stages.envs.rollouts import embodied, obs_stats, rollout
from stages.learn import soft_actor_critic
from stages.models.control import critics as critics_lib


class State(NamedTuple):
  """State carried from step to step.

  Attributes:
    actor: parameters of the policy, and the log of the temperature.
    critic: the critics.
    target: Polyak average of the critics' parameters.
    replay: transitions of the last steps.
    offline_data: transitions recorded before training; `()` without any.
    obs_stats: running moments of observations; `()` if not normalized.
    env_state: state of the environments, or their tokens.
    obs: their current observations.
    episodes: running statistics of unfinished episodes.
    step: number of steps so far.
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
  env: env_lib.Env,
  policy: Callable[..., base.Policy],
  critic: Callable[[env_lib.Env], critics_lib.Critic],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: ranges.PositiveInt,
  num_steps: ranges.PositiveInt,
  capacity: ranges.PositiveInt,
  batch_size: ranges.PositiveInt = 256,
  utd_ratio: ranges.PositiveFloat = 1.0,
  actor_update_period: ranges.PositiveInt = 1,
  learning_starts: ranges.NonNegativeInt = 1,
  discount: ranges.Fraction = 0.99,
  tau: ranges.Fraction = 0.005,
  init_temperature: ranges.PositiveFloat = 1.0,
  target_entropy: float | None = None,
  critic_subset: ranges.PositiveInt | None = None,
  offline_data: str | None = None,
  normalize_obs: bool = True,
  bootstrap_on_success: bool = False,
  eval_env: env_lib.Env | None = None,
) -> base.Workflow:
  """Collects steps in environments and learns from a replay of past ones.

  Args:
    env: environments to act in.
    policy: makes the policy for an environment's observations and actions;
      called with `bounding='tanh'`, `state_dependent_std=True` and
      `critic=False`.
    critic: makes the critics for an environment.
    optimizer: optimizer of the actor, and of the critics. Its schedule counts
      the updates of each.
    num_envs: number of environments.
    num_steps: steps in each environment between updates.
    capacity: transitions that the replay holds.
    batch_size: transitions in a minibatch.
    utd_ratio: updates of the critics for each transition (update-to-data).
    actor_update_period: updates of the critics for each one of the actor; in
      RLPD, all updates of a step.
    learning_starts: first steps (of `num_envs` × `num_steps` transitions) in
      which actions are uniform and nothing is learned.
    discount: γ, per environment step.
    tau: τ, weight of the new parameters in the target's Polyak average.
    init_temperature: initial α.
    target_entropy: H, in nats, which α keeps the policy's entropy at; None for
      −dim(A), where the range of each action dimension is −1 … 1.
    critic_subset: critics drawn anew for every update, the least of which is
      the target; the actor then maximizes the mean of all critics, as in REDQ
      and RLPD. None: the least of all critics for both, as in SAC.
    offline_data: file of transitions that half of each minibatch is drawn from
      (`stages.envs.replay.write`); None for no such file.
    normalize_obs: whether observations are normalized by running moments.
    bootstrap_on_success: treats success like a time limit: the value of the
      final observation counts, so that an early success loses no reward. Other
      terminations, such as failures, still end the return. Not possible with
      `offline_data`, whose files do not say which terminations were successes.
    eval_env: environments for evaluation, which a simulator needs apart from
      those it trains in; `env` if None.
  """
  critic = critic(env)
  policy = policy(env, bounding='tanh', state_dependent_std=True, critic=False)
  shapes = transition_shapes(policy, env)
  check_offline_data(offline_data, shapes, bootstrap_on_success)
  if target_entropy is None:
    target_entropy = default_target_entropy(env, shapes.env_action)
  n = num_updates(utd_ratio, num_envs * num_steps, actor_update_period)
  act = rollout.rollout(uniform_while_warm(policy), env, num_steps)
  warmup = warmup_stage(learning_starts)
  count_episodes = stages.Stage(episode_stats.update, 'episode_stats')
  measure = stages.Stage(describe, 'measure', 'sum')
  update_obs_stats = embodied.update_obs_stats(env, normalize_obs)
  replay = replay_stage(policy, discount, n, batch_size, bootstrap_on_success)
  learner = soft_actor_critic.learner(
    policy,
    critic,
    optimizer,
    init_temperature=init_temperature,
    num_updates=n,
    actor_update_period=actor_update_period,
    tau=tau,
    critic_subset=critic_subset,
    target_entropy=target_entropy,
  )

  def init(key):
    *keys, env_key = jax.random.split(key, 3)
    return State(
      *learner.init(*keys),
      replay_lib.empty(shapes, capacity),
      read_offline(offline_data, shapes, discount),
      obs_stats.init(env.obs_spec) if normalize_obs else (),
      *embodied.reset(env, num_envs, env_key),
      jnp.zeros((), jnp.int32),
    )

  def step(state: State, batch, key):
    del batch  # The environments are the data.
    actor, stats = state.actor, state.obs_stats
    warm, step = warmup(state.step)
    keys = stages.keys(key, state.obs)
    env_state, obs, x, timestep = act(
      (actor.params['policy'], warm), stats, state.env_state, state.obs, keys
    )
    episodes, ended = count_episodes(state.episodes, timestep)
    rollout_info = measure(timestep._replace(final_obs=()), ended)
    stats = update_obs_stats(stats, x.obs)
    stored, sample, replay_info = replay(
      state.replay, state.offline_data, x, timestep, key
    )
    actor, (critic, target), info = learner.update(
      actor, (state.critic, state.target), stats, warm, sample, key
    )
    state = state._replace(env_state=env_state, obs=obs, episodes=episodes)
    state = state._replace(
      actor=actor, critic=critic, target=target, replay=stored, obs_stats=stats
    )
    return state._replace(step=step), rollout_info | replay_info | info

  return embodied.workflow(init, step, policy, eval_env or env, policy_state)


def policy_state(state: State) -> dict[str, Any]:
  """The policy's parameters and observation statistics, for evaluation."""
  params = state.actor.params['policy']
  return {'policy': params, 'obs_stats': state.obs_stats}


def check_offline_data(
  offline_data: str | None,
  shapes: replay_lib.Transition,
  bootstrap_on_success: bool = False,
):
  """Raises an error for a file of transitions that lacks what is asked for.

  It has neither the steps that were made of a chunk nor successes.
  """
  if offline_data and bootstrap_on_success:
    raise ValueError(
      'A file of transitions does not say which terminations were successes, '
      'so that bootstrap_on_success cannot tell them from failures: leave out '
      '`offline_data` or `bootstrap_on_success`.'
    )
  if offline_data and len(shapes.env_action.shape) > 1:
    raise ValueError(
      'A file of transitions does not say how many steps of an action chunk '
      'were made, so that the value after it cannot be discounted: leave out '
      '`offline_data`, or use chunks of one step.'
    )


def read_offline(
  offline_data: str | None,
  shapes: replay_lib.Transition,
  discount: float,
) -> replay_lib.Transition | tuple[()]:
  """Reads the transitions recorded before training; `()` without a file."""
  if not offline_data:
    return ()
  return replay_lib.read(offline_data, shapes, discount)


def warmup_stage(learning_starts: int) -> stages.Stage:
  """Counts steps: a stage `step -> warm, step + 1`.

  `warm` is true in the first `learning_starts` steps.
  """
  count = lambda step: (step < learning_starts, step + 1)
  return stages.Stage(count, 'warmup', 'batch')


def replay_stage(
  policy: base.Policy,
  discount: float,
  num_minibatches: int,
  batch_size: int,
  bootstrap_on_success: bool,
) -> stages.Stage:
  """Returns `store_and_sample` with these arguments as a stage."""
  store = functools.partial(
    store_and_sample,
    policy,
    discount,
    num_minibatches,
    batch_size,
    bootstrap_on_success=bootstrap_on_success,
  )
  return stages.Stage(store, 'replay', 'batch', consumes=(0,))


def num_updates(
  utd_ratio: float,
  num_transitions: int,
  actor_update_period: int,
) -> int:
  """Updates of the critics in a step of so many transitions."""
  n = round(utd_ratio * num_transitions)
  whole = n >= 1 and abs(n - utd_ratio * num_transitions) <= 1e-6
  if not whole or n % actor_update_period:
    raise ValueError(
      f'{utd_ratio} updates for each of {num_transitions} transitions are '
      f'{utd_ratio * num_transitions:g} in a step, which must be a whole '
      'number of at least 1 and a multiple of actor_update_period='
      f'{actor_update_period}.'
    )
  return n


def uniform_while_warm(policy: base.Policy) -> base.Policy:
  """Makes actions uniform within the bounds while a flag is true.

  The parameters of the returned policy are `(params, warm)`.
  """

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    params, warm = params
    x = policy.act(params, obs, key_B, group_size=group_size, greedy=greedy)
    shape = x.action.shape[1:]
    draw = lambda key: jax.random.uniform(key, shape, x.action.dtype, -1, 1)
    # tanh maps these back into the bounds; arctanh(±1) is infinite.
    uniform_BA = jnp.arctanh((1.0 - 1e-6) * jax.vmap(draw)(key_B))
    return x._replace(action=jnp.where(warm, uniform_BA, x.action))

  # No policy that explores in this way is of a narrower type.
  return policy._replace(act=act, round_params=None, prepare_act=None)


def store_and_sample(
  policy: base.Policy,
  discount: float,
  num_minibatches: int,
  batch_size: int,
  replay: replay_lib.Replay,
  offline_data: replay_lib.Transition | tuple[()],
  x: base.Experience,
  timestep: env_lib.TimeStep,
  key,
  *,
  bootstrap_on_success: bool = False,
):
  """Stores [B, T] steps in the replay, and draws minibatches from it.

  The next observation at the end of an episode is its final one. The value
  after it counts unless the episode terminated, and after a success in any case
  if `bootstrap_on_success`. Steps in which a simulator failed are not stored.

  Returns:
    The replay, a sample of all minibatches, and metrics.
  """
  steps = jnp.ones_like(timestep.reward)
  if timestep.steps is not None:
    steps = timestep.steps
  ends = timestep.terminated
  if bootstrap_on_success:
    ends = ends * (1.0 - timestep.success)
  new = replay_lib.Transition(
    x.obs,
    policy.to_env_action(x.action),
    timestep.reward,
    discount**steps * (1.0 - ends),
    timestep.final_obs,
  )
  mask = x.mask
  if timestep.env_failed is not None:
    mask = 1.0 - timestep.env_failed
  # Time-major, so that the ring overwrites the oldest steps first.
  new, mask = jax.tree.map(
    lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), (new, mask)
  )
  replay = replay_lib.put(replay, new, mask)
  sample = replay_lib.draw(
    replay, offline_data, key, num_minibatches, batch_size
  )
  Y = jax.tree.leaves(replay.rows)[0].shape[0]
  filled = replay.filled.astype(timestep.reward.dtype)
  fraction = metrics.Mean(filled, jnp.full_like(filled, Y))
  return replay, sample, {'replay/filled': fraction}


def describe(
  timestep: env_lib.TimeStep, ended: episode_stats.EpisodeStats
) -> base.Info:
  """Metrics of a rollout, and of the episodes that ended in it."""
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


def transition_shapes(
  policy: base.Policy, env: env_lib.Env
) -> replay_lib.Transition:
  """Shapes of one transition.

  Raises:
    ValueError: for a policy with several log-probabilities a step.
  """

  def act(key):
    obs = jax.tree.map(
      lambda x: jnp.zeros((1, *x.shape), x.dtype), env.obs_spec
    )
    x = policy.act(policy.init(key), obs, key[None])
    return policy.to_env_action(x.action)[0], x.logp

  action, logp = jax.eval_shape(act, jax.random.key(0))
  if logp.ndim > 1:
    raise ValueError(
      'The policy has log-probabilities of tokens or actions, and SAC takes '
      "that of a whole chunk: leave out `logp_of`, or set it to 'chunk'."
    )
  number = jax.ShapeDtypeStruct((), jnp.result_type(float))
  return replay_lib.Transition(
    env.obs_spec, action, number, number, env.obs_spec
  )


def default_target_entropy(env: env_lib.Env, env_action) -> float:
  """−1 nat for each action dimension, as if its range were −1 … 1."""
  A = math.prod(env_action.shape)
  half = [
    0.5 * (b - a) for a, b in zip(env.action_low, env.action_high, strict=True)
  ]
  return -A + A // len(half) * sum(map(math.log, half))
