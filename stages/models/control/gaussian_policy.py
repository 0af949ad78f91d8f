"""A Gaussian policy for robots: observations in, action vectors out."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from stages import base, granularity, ranges
from stages.envs import action_range
from stages.envs import env as env_lib
from stages.models.control import cnn, mlp, shared_encoder


def policy(
  env: env_lib.Env,
  *,
  width: ranges.PositiveInt = 64,
  init_std: ranges.PositiveFloat = 1.0,
  bounding: Literal['clip', 'tanh'] = 'clip',
  chunk: ranges.PositiveInt = 1,
  state_dependent_std: bool = False,
  critic: bool = True,
  logp_of: granularity.LogpOf = 'chunk',
  value_of: granularity.ValueOf = 'chunk',
  camera_encoder: cnn.Config = cnn.Config(),
  ignored: tuple[str, ...] = (),
) -> base.Policy:
  """An actor and a critic, two small networks, for an environment's spaces.

  Image observations go through one encoder that both share and both train;
  vector observations are concatenated to its output.

  Actions are sampled from a Gaussian, in units where −1 … 1 is the
  environment's range of each dimension. An `action` is the sample itself, so
  that its log-probability is exact; `to_env_action` brings it within bounds.

  Args:
    env: its observations are vectors and images, alone or in a dict.
    width: of the hidden layers.
    init_std: initial standard deviation of actions; 1 is half of the range.
    bounding: how samples are brought within bounds. 'clip' clips them, and a
      log-probability is the Gaussian's. 'tanh' squashes them, and a
      log-probability is that of the squashed action; its entropy has no closed
      form and is approximated by the Gaussian's plus the log-slope of the
      squashing at the mean.
    chunk: steps that are decided at a time. An action is all of them; the
      environment's action is [chunk, A] if chunk > 1.
    state_dependent_std: whether the standard deviation depends on the
      observation; otherwise it is a parameter.
    critic: whether the policy has a critic.
    logp_of: what has a log-probability, see `granularity`; a token is a number
      of an action. Not for SAC, which takes that of the whole.
    value_of: what has a value, likewise.
    camera_encoder: the network of each camera, if there are images.
    ignored: names of observations that the policy does not read, such as an
      instruction that never changes.

  Raises:
    ValueError: if `bounding` is unknown, actions are discrete, or the network
      cannot read an observation.
  """
  if bounding not in ('clip', 'tanh'):
    raise ValueError(
      f"`bounding` must be 'clip' or 'tanh', and is {bounding!r}."
    )
  low, high = action_range.bounds(env, chunk)
  Z = granularity.num_values(value_of, logp_of, chunk)
  config = mlp.Config(low.shape[0], width, width, init_std, state_dependent_std)
  networks = shared_encoder.networks(
    cnn.encoder(env.obs_spec, camera_encoder, ignored),
    env.obs_spec,
    mlp.Actor(config),
    mlp.Critic(config, Z) if critic else None,
  )
  squash = bounding == 'tanh'
  reduce = granularity.reducer(logp_of, chunk)
  log_slope = functools.partial(action_range.log_slope, low=low, high=high)

  def distribution(params, x):
    mean, log_std = networks.actor(params, x)
    return mean, action_range.broadcast(log_std, mean)

  def log_density(action, mean, log_std):
    logp = gaussian(action, mean, log_std)
    return reduce(logp - log_slope(action) if squash else logp)

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del group_size  # Nothing is shared within a group.
    mean_BA, log_std_BA = distribution(params, networks.encode(params, obs))
    draw = functools.partial(jax.random.normal, shape=mean_BA.shape[1:])
    noise_BA = jax.vmap(draw)(key_B)
    sample_BA = mean_BA + jnp.exp(log_std_BA) * noise_BA
    action_BA = mean_BA if greedy else sample_BA
    logp = log_density(action_BA, mean_BA, log_std_BA)
    one_B = jnp.ones_like(mean_BA[:, 0])
    return base.Experience(obs, action_BA, logp, one_B, 0.0 * one_B)

  def evaluate(params, obs, action, *, group_size=1):
    del group_size
    x = networks.encode(params, obs)
    mean, log_std = distribution(params, x)
    entropy = gaussian_entropy(log_std)
    if squash:
      entropy += log_slope(mean)
    return base.Evaluation(
      log_density(action, mean, log_std),
      reduce(entropy),
      networks.value(params, x) if networks.value else None,
    )

  def value(params, obs):
    return networks.value(params, networks.encode(params, obs))

  to_env_action = functools.partial(
    action_range.bounded, squash, low, high, chunk
  )
  return base.Policy(
    networks.init, act, evaluate, to_env_action, value if critic else None
  )


def gaussian(x, mean, log_std):
  """log N(x) of each number.

  −½ ((x − μ) / σ)² − log σ − ½ log 2π
  """
  z = (x - mean) * jnp.exp(-log_std)
  return -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(log_std):
  """½ log 2πe + log σ of each number, in nats."""
  return log_std + 0.5 * math.log(2 * math.pi * math.e)
