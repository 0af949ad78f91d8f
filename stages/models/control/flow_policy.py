"""A flow-matching policy: noise becomes a chunk of actions in K steps."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from stages import base, granularity, ranges
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.models.control import (
  cnn,
  flow_matching,
  gaussian_policy,
  mlp,
  shared_encoder,
)


class Denoising(NamedTuple):
  """An action of a flow-matching policy, and the steps that led to it.

  Attributes:
    path: the chunk of actions before the first step, which is noise, and after
      each of the K steps, in units where −1 … 1 is the environment's range. A
      is all numbers of a chunk.
    stochastic: numbers of the stochastic steps: one of Flow-SDE, 0 … K − 1 of
      Flow-Noise.
    offset: what actions are relative to, in the units of the environment, as
      it was when they were decided; `()` if they are absolute.
  """

  path: Float[Array, '... steps A']
  stochastic: Int[Array, '... some']
  offset: Float[Array, '... width'] | tuple[()] = ()


class Networks(NamedTuple):
  """Networks of a flow-matching policy, as functions of parameters.

  Attributes:
    init: `key -> params`.
    encode: `params, obs -> context`: what all steps read of an observation, a
      tree of arrays with its leading dimensions. It is computed once.
    velocity: `params, context, x, t -> v, spread`, both [..., A]; `spread` is
      the output from which Flow-Noise's standard deviation follows, None where
      the network has none.
    value: `params, context -> value`; None without a critic.
    encode_augmented: `params, obs, keys -> context`, of observations that are
      changed at random, in training by imitation; None for `encode`.
  """

  init: Callable[[base.Key], base.Params]
  encode: Callable[[base.Params, Any], Any]
  velocity: Callable[..., Any]
  value: Callable[[base.Params, Any], Any] | None = None
  encode_augmented: Callable[[base.Params, Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Exploration:
  """Settings of stochastic denoising, for reinforcement learning.

  Attributes:
    kind: 'sde' for Flow-SDE: one step, drawn for each row, is a step of a
      stochastic differential equation, and the others follow the velocity.
      'noise' for Flow-Noise: each step adds noise, whose size is learned.
    noise_level: a of Flow-SDE's σ = a √(t / (1 − t)).
    min_std: least standard deviation of the noise of a step of Flow-Noise.
    max_std: greatest standard deviation, likewise.
    mean_over_steps: whether the log-probability of Flow-Noise is the mean over
      the initial noise and all steps, as in RLinf, rather than their sum, which
      is the log-density of the path.
  """

  kind: Literal['sde', 'noise'] = 'sde'
  noise_level: ranges.PositiveFloat = 0.5
  min_std: ranges.PositiveFloat = 0.08
  max_std: ranges.PositiveFloat = 0.16
  mean_over_steps: bool = False

  def __post_init__(self):
    if self.kind not in ('sde', 'noise'):
      raise ValueError(
        f"`kind` of exploration must be 'sde' or 'noise', and is {self.kind!r}."
      )
    if self.min_std > self.max_std:
      raise ValueError(
        f'Standard deviations from {self.min_std} to {self.max_std} are '
        'none: make `min_std` the smaller one.'
      )


def policy(
  env: env_lib.Env,
  *,
  width: ranges.PositiveInt = 128,
  chunk: ranges.PositiveInt = 1,
  num_steps: ranges.PositiveInt = 4,
  exploration: Exploration = Exploration(),
  critic: bool = True,
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  camera_encoder: cnn.Config = cnn.Config(),
  ignored: tuple[str, ...] = (),
) -> base.Policy:
  """A flow-matching policy of small networks, for an environment's spaces.

  The velocity is a network of the observation, xₜ and t; images go through one
  encoder, which the critic shares. See `of_networks`.

  Args:
    env: its observations are vectors and images, alone or in a dict.
    width: of the hidden layers, and of the embedding of time.
    chunk: steps of the environment that are decided at a time. The
      environment's action is [chunk, A] if chunk > 1.
    num_steps: K, steps from noise to an action.
    exploration: how actions are sampled.
    critic: whether the policy has a critic.
    logp_of: what has a log-probability, see `of_networks`.
    value_of: what has a value, see `granularity`.
    camera_encoder: the network of each camera, if there are images.
    ignored: names of observations that the policy does not read.

  Raises:
    ValueError: if the network cannot read an observation.
  """
  A = len(env.action_low) * chunk
  Z = granularity.num_values(value_of, logp_of, chunk)
  networks = shared_encoder.networks(
    cnn.encoder(env.obs_spec, camera_encoder, ignored),
    env.obs_spec,
    Velocity(D=width, F=width, spread=exploration.kind == 'noise'),
    mlp.Critic(mlp.Config(A, width, width), Z) if critic else None,
    jnp.zeros(A),
    jnp.zeros(()),
  )
  low, high = action_range.bounds(env, chunk)
  return of_networks(
    Networks(*networks),  # The actor is the velocity.
    functools.partial(action_range.bounded, False, low, high, chunk),
    width=len(env.action_low),
    chunk=chunk,
    num_steps=num_steps,
    exploration=exploration,
    logp_of=logp_of,
  )


def of_networks(
  networks: Networks,
  to_env_action: Callable,
  *,
  width: int,
  chunk: int,
  num_steps: int,
  exploration: Exploration = Exploration(),
  logp_of: granularity.LogpOf = 'chunk',
  action_width: int | None = None,
  executed: int | None = None,
  offset: Callable[[Any], Any] | None = None,
) -> base.Policy:
  """The policy that denoises by given networks.

  An `action` is a `Denoising`, so that the steps that were made have exact
  log-probabilities. Actions that are greedy follow the velocity without noise,
  from noise that the row's key draws.

  The log-probability of Flow-SDE is that of its stochastic step, given its
  number and where it started; that of Flow-Noise is that of the whole path,
  initial noise included. The entropy is that of the same distributions, given
  where each step started. Noise of different numbers is independent, so that
  both are sums over the numbers of a chunk.

  Args:
    networks: the velocity, and the critic.
    to_env_action: turns what the last step leads to, [..., executed · width],
      into actions of the environment.
    width: numbers of an action of the environment.
    chunk: steps of the environment that are decided at a time.
    num_steps: K.
    exploration: how actions are sampled.
    logp_of: what has a log-probability, see `granularity`; a token is a number
      of an action, whose density is given by where its step started. Velocities
      read the whole chunk before it.
    action_width: numbers of an action of the network, where these are more than
      the environment takes. The others are denoised, too, but have no
      log-probability; in demonstrations they are zero.
    executed: first actions of a chunk that the environment gets; likewise.
    offset: `obs -> offset`, what actions are relative to, [..., width], which
      `to_env_action` gets as its second argument; None if they are absolute.
  """
  action_width = action_width or width
  A = action_width * chunk
  # Indices of the numbers that the environment takes.
  kept = np.arange(A).reshape(chunk, -1)[:executed, :width].ravel()
  distribution = functools.partial(_distribution, exploration, num_steps)
  reduce = granularity.reducer(logp_of, executed or chunk)
  score = functools.partial(_score, exploration, num_steps, kept, reduce)

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del group_size  # Nothing is shared within a group.
    context = networks.encode(params, obs)
    draw = functools.partial(_draw, exploration.kind, A, num_steps)
    initial_BA, stochastic, noise = jax.vmap(draw)(key_B)

    def step(x_BA, k):
      k_B = jnp.full(x_BA.shape[:1], k)
      t_B = flow_matching.step_time(k_B, num_steps).astype(x_BA.dtype)
      predicted = networks.velocity(params, context, x_BA, t_B)
      next_BA = flow_matching.euler_step(x_BA, predicted[0], num_steps)
      if not greedy:
        mean_BA, std_BA = distribution(x_BA, predicted, k_B)
        here = (stochastic == k)[..., None]
        sampled_BA = mean_BA + std_BA * (here * noise).sum(1)
        next_BA = jnp.where(here.any(1), sampled_BA, next_BA)
      return next_BA, predicted

    path, predicted = flow_matching.denoise(step, initial_BA, num_steps)
    action = Denoising(path, stochastic, offset(obs) if offset else ())
    taken = jax.tree.map(
      lambda x: _take(jnp.moveaxis(x, 0, -2), stochastic), predicted
    )
    logp, _ = score(action, taken)
    one_B = jnp.ones_like(initial_BA[:, 0])
    return base.Experience(obs, action, logp, one_B, 0.0 * one_B)

  def evaluate(params, obs, action, *, group_size=1):
    del group_size
    context = networks.encode(params, obs)
    x = _take(action.path, action.stochastic)
    t = flow_matching.step_time(action.stochastic, num_steps).astype(x.dtype)
    velocity = functools.partial(networks.velocity, params, context)
    predicted = jax.vmap(velocity, (-2, -1), -2)(x, t)
    logp, entropy = score(action, predicted)
    value = networks.value(params, context) if networks.value else None
    return base.Evaluation(logp, entropy, value)

  def value(params, obs):
    return networks.value(params, networks.encode(params, obs))

  def executed_actions(action):
    origin = (action.offset,) if offset else ()
    return to_env_action(action.path[..., -1, kept], *origin)

  return base.Policy(
    networks.init,
    act,
    evaluate,
    executed_actions,
    value if networks.value else None,
    imitation_loss=functools.partial(
      _imitation_loss, networks, (chunk, action_width)
    ),
    imitation_is_mean=True,
  )


def _distribution(exploration: Exploration, num_steps: int, x, predicted, k):
  """Mean and standard deviation of what stochastic steps `k` at `x` lead to."""
  v, spread = predicted
  if exploration.kind == 'sde':
    return flow_matching.sde_step(x, v, k, num_steps, exploration.noise_level)
  log_std = flow_matching.bounded_log_std(
    spread, exploration.min_std, exploration.max_std
  )
  return flow_matching.euler_step(x, v, num_steps), jnp.exp(log_std)


def _score(
  exploration: Exploration,
  num_steps: int,
  kept,
  reduce: Callable,
  action: Denoising,
  predicted,
):
  """Log-probability and entropy of an action.

  Args:
    exploration: how it was sampled.
    num_steps: K.
    kept: indices of the numbers whose log-probability counts.
    reduce: sums numbers to what has a log-probability.
    action: it and the steps that led to it.
    predicted: velocity and spread before each stochastic step.
  """
  x = _take(action.path, action.stochastic)
  after = _take(action.path, action.stochastic + 1)
  mean, std = _distribution(
    exploration, num_steps, x, predicted, action.stochastic
  )
  after, mean, std = (x[..., kept] for x in (after, mean, std))
  log_std = jnp.log(std)
  logp = gaussian_policy.gaussian(after, mean, log_std).sum(-2)
  entropy = gaussian_policy.gaussian_entropy(log_std).sum(-2)
  if exploration.kind == 'noise':
    initial = action.path[..., 0, kept]
    zero = jnp.zeros_like(initial)
    logp += gaussian_policy.gaussian(initial, zero, zero)
    entropy += gaussian_policy.gaussian_entropy(zero)
    if exploration.mean_over_steps:
      logp, entropy = logp / (num_steps + 1), entropy / (num_steps + 1)
  return reduce(logp), reduce(entropy)


def _imitation_loss(
  networks: Networks, shape, params, obs, action, key_B, *, train=False
):
  """The flow-matching loss at a random time and noise of each row.

  Actions are padded with zeros to `shape`, that of a chunk.
  """
  Z, width = shape
  action_range.check_chunk(action, Z)
  if train and networks.encode_augmented:
    image_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, 2)
    context = networks.encode_augmented(params, obs, image_key_B)
  else:
    context = networks.encode(params, obs)
  B, A = action.shape[0], Z * width
  chunk = action.reshape(B, Z, -1)
  padding = (0, 0), (0, 0), (0, width - chunk.shape[-1])
  action_BA = jnp.pad(chunk, padding).reshape(B, A)
  key_2B = jax.vmap(jax.random.split, out_axes=1)(key_B)
  noise_BA = jax.vmap(lambda key: jax.random.normal(key, (A,)))(key_2B[0])
  t_B = jax.vmap(flow_matching.draw_time)(key_2B[1])
  velocity = lambda x, t: networks.velocity(params, context, x, t)[0]
  return flow_matching.matching_loss(velocity, action_BA, noise_BA, t_B)


def _draw(kind: str, A: int, num_steps: int, key):
  """Initial noise, the stochastic steps and their noise, of one row."""
  noise_key, step_key, index_key = jax.random.split(key, 3)
  initial_A = jax.random.normal(noise_key, (A,))
  stochastic = jnp.arange(num_steps)
  if kind == 'sde':
    stochastic = jax.random.randint(index_key, (1,), 0, num_steps)
  return (
    initial_A,
    stochastic,
    jax.random.normal(step_key, (*stochastic.shape, A)),
  )


def _take(path, k):
  """Entries `k` [..., some] of `path` [..., steps, A]."""
  return jnp.take_along_axis(path, k[..., None], axis=-2)


class Velocity(nn.Module):
  """The velocity, and the output that gives the noise of Flow-Noise.

  The last layer starts small: actions are noise to begin with.

  Attributes:
    D: width of the first hidden layer, and of the embedding of time.
    F: width of the two others.
    spread: whether it has a second output.
  """

  D: int
  F: int
  spread: bool

  @nn.compact
  def __call__(self, context, x, t):
    """`[…, O], […, A], […] -> […, A]`, twice or with None."""
    A, root = x.shape[-1], 2**0.5
    time = flow_matching.time_embedding(t, self.D)
    h = jnp.concatenate([context, x, time], -1)
    h = nn.swish(mlp.layer(self, h, 'enter', 'OD', (h.shape[-1], self.D), root))
    h = nn.swish(mlp.layer(self, h, 'up', 'DF', (self.D, self.F), root))
    v = mlp.layer(self, h, 'out', 'FA', (self.F, A), 0.01)
    if not self.spread:
      return v, None
    return v, mlp.layer(self, h, 'spread', 'FA', (self.F, A), 0.01)
