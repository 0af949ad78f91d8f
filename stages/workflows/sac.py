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
    prior: what others have done before; nothing where none is learned from.
    scale: moments of all that was seen; nothing where none are kept.
    world: the state of the environments, or their tokens.
    obs: what is seen in them.
    open: how the episodes go that have not ended.
    step: steps so far.
  """

  actor: base.TrainState
  critic: base.TrainState
  target: base.Params
  replay: replay_lib.Replay
  prior: replay_lib.Transition | tuple[()]
  scale: Any
  world: Any
  obs: Any
  open: episode_stats.Open
  step: jax.Array


def sac(
  world: base.Env,
  policy: Callable[..., base.Policy],
  critic: Callable[[base.Env], critics_lib.Critic],
  optimizer: optax.GradientTransformation,
  *,
  num_envs: int,
  num_steps: int,
  capacity: int,
  batch: int = 256,
  utd: float = 1.0,
  actor_update_period: int = 1,
  warmup: int = 1,
  discount: float = 0.99,
  polyak: float = 0.005,
  temperature: float = 1.0,
  target_entropy: float | None = None,
  subset: int | None = None,
  prior: str | None = None,
  normalize_obs: bool = True,
  bootstrap_on_success: bool = False,
  eval_env: base.Env | None = None,
) -> base.Workflow:
  """Acts for some steps in environments, and learns from all that was done.

  Args:
    world: to act in.
    policy: makes the policy to train from what a world shows and takes; it is
      asked for actions that are squashed, for a deviation that depends on what
      is seen, and for no critic of its own.
    critic: makes the critics, likewise.
    optimizer: how gradients become updates, of the actor and of the critics:
      its schedule counts those that each of them makes once it has warmed up.
    num_envs: environments.
    num_steps: steps in each, between updates.
    capacity: steps that are remembered.
    batch: of them, those of a minibatch.
    utd: updates of the critics for every step of an environment.
    actor_update_period: updates of the critics for one of the actor; RLPD has
      all of a step.
    warmup: steps (of `num_envs` × `num_steps`) that act at random and learn
      nothing.
    discount: γ, a step.
    polyak: τ, how much of the critics the average takes at an update.
    temperature: α at the beginning.
    target_entropy: H, which α is to bring the policy's to, in nats; −dim(A) if
      None, where the range of each dimension of a command is −1 … 1.
    subset: critics, chosen anew for every update, the least of which is what
      is expected; then the actor climbs the mean of all, as REDQ and RLPD have
      it. None: the least of all, for both, as SAC has it.
    prior: file of demonstrations that half of each minibatch is drawn from, as
      `stages.replay.write` makes it; None for none.
    normalize_obs: whether observations are put on a scale of their own.
    bootstrap_on_success: takes success, too, for an end that time has set, so
      that whoever is done early loses nothing by it.
    eval_env: the world in which the policy is judged: a simulator needs another
      than it trains in. `world` if None.
  """
  critic = critic(world)
  policy = policy(world, bound='tanh', aware=True, critic=False)
  like = _like(policy, world)
  if prior and len(like.command.shape) > 1:
    raise ValueError(
      'A file of demonstrations does not say how many steps of a chunk were '
      'made, so what follows one cannot be discounted: leave out `prior`, or '
      'decide one step at a time.'
    )
  n = updates(utd, num_envs * num_steps, actor_update_period)
  if target_entropy is None:
    target_entropy = default_target_entropy(world, like.command)
  act = rollout.rollout(at_random(policy), world, num_steps)
  begin = stages.Stage(lambda step: (step < warmup, step + 1), 'begin', 'batch')
  count = stages.Stage(episode_stats.count, 'tally')
  measure = stages.Stage(describe, 'measure', 'sum')
  recall = stages.Stage(
    functools.partial(
      remember, policy, discount, n, batch, always=bootstrap_on_success
    ),
    'replay',
    'batch',
    consumes=(0,),
  )
  see = stages.Stage(lambda obs: obs_stats.of(obs, world.obs), 'see', 'sum')
  widen = stages.Stage(lambda a, b: a.merge(b), 'widen', 'batch')
  learn = soft_actor_critic.learner(
    (policy, critic, optimizer),
    *(n, actor_update_period, polyak, subset, target_entropy),
  )
  attempt = evaluate_lib.examine(policy, eval_env or world)

  def init(key):
    luck, theirs, seeds = jax.random.split(key, 3)
    seed_B = jax.random.randint(
      seeds, (num_envs,), 0, jnp.iinfo(jnp.int32).max, jnp.int32
    )
    ours = {
      'policy': policy.init(luck),
      'log_temperature': jnp.log(jnp.full((), temperature, float)),
    }
    params = critic.init(theirs)
    return State(
      train_step.init(ours, optimizer),
      train_step.init(params, optimizer),
      params,
      replay_lib.empty(like, capacity),
      replay_lib.read(prior, like, discount, bootstrap_on_success)
      if prior
      else (),
      obs_stats.nothing(world.obs) if normalize_obs else (),
      *rollout.begin(world, seed_B),
      episode_stats.begin(num_envs),
      jnp.zeros((), jnp.int32),
    )

  def step(state: State, batch, key):
    del batch  # All there is to know is in the environments.
    actor, scale = state.actor, state.scale
    warm, steps = begin(state.step)
    keys = stages.keys(key, state.obs)
    place, obs, x, outcome = act(
      (actor.params['policy'], warm), scale, state.world, state.obs, keys
    )
    open_, ended = count(state.open, outcome)
    measured = measure(outcome._replace(final_obs=()), ended)
    if normalize_obs:
      scale = widen(scale, see(x.obs))
    kept, sample, filled = recall(state.replay, state.prior, x, outcome, key)
    actor, critics, info = learn(
      *(actor, (state.critic, state.target), scale, warm, sample, key)
    )
    return State(
      *(actor, *critics, kept, state.prior, scale, place, obs, open_, steps)
    ), measured | filled | info

  def evaluate(state: State, seed, key):
    params = state.actor.params['policy']
    return attempt(params, state.scale, seed, key)

  def params(state: State):
    return {'policy': state.actor.params['policy'], 'scale': state.scale}

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
  policy, discount, n, batch, kept, prior, x, outcome, key, *, always=False
):
  """Puts a batch of steps into the replay, and draws `n` minibatches from it.

  What follows the last step of an episode that time has ended is what was seen
  then, and counts; only termination ends what there is to expect, and not that
  if what follows counts `always`. What a simulator has lost is not remembered.
  """
  steps = jnp.ones_like(outcome.reward)
  if outcome.steps is not None:
    steps = outcome.steps
  ends = 0.0 if always else outcome.terminated
  new = replay_lib.Transition(
    x.obs,
    policy.command(x.action),
    outcome.reward,
    discount**steps * (1.0 - ends),
    outcome.final_obs,
  )
  mask = x.mask if outcome.lost is None else 1.0 - outcome.lost
  # What was done first is first overwritten.
  new, mask = jax.tree.map(
    lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), (new, mask)
  )
  kept = replay_lib.put(kept, new, mask)
  sample = replay_lib.draw(kept, prior, key, n, batch)
  Y = jax.tree.leaves(kept.rows)[0].shape[0]
  share = kept.filled.astype(outcome.reward.dtype)
  filled = metrics.Mean(share, jnp.full_like(share, Y))
  return kept, sample, {'replay/filled': filled}


def describe(outcome: base.TimeStep, ended: episode_stats.Ended) -> base.Info:
  """What is worth knowing of a rollout."""
  mask = jnp.ones_like(outcome.reward)
  if outcome.lost is not None:
    mask -= outcome.lost
  steps = mask if outcome.steps is None else outcome.steps * mask
  return (
    episode_stats.told(ended, 'env')
    | episode_stats.faults(outcome)
    | {
      'rollout/reward': metrics.moments(outcome.reward, mask),
      'env/steps': steps.sum(),
    }
  )


def _like(policy: base.Policy, world: base.Env) -> replay_lib.Transition:
  """One transition, as shapes."""

  def decide(key):
    obs = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), world.obs)
    x = policy.act(policy.init(key), obs, key[None])
    return policy.command(x.action)[0]

  command = jax.eval_shape(decide, jax.random.key(0))
  number = jax.ShapeDtypeStruct((), jnp.result_type(float))
  return replay_lib.Transition(world.obs, command, number, number, world.obs)


def default_target_entropy(world: base.Env, command) -> float:
  """−1 for each dimension, as if its range were −1 … 1."""
  A = math.prod(command.shape)
  half = [0.5 * (b - a) for a, b in zip(world.low, world.high, strict=True)]
  return -A + A // len(half) * sum(map(math.log, half))
