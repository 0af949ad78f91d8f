"""A Gaussian policy for robots: observations in, action vectors out."""

from collections.abc import Callable
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from stages import base, ranges
from stages.models import cnn, mlp


def policy(
  env: base.Env,
  *,
  width: ranges.PositiveInt = 64,
  init_std: ranges.PositiveFloat = 1.0,
  bounding: Literal['clip', 'tanh'] = 'clip',
  chunk: ranges.PositiveInt = 1,
  state_dependent_std: bool = False,
  critic: bool = True,
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
    chunk: steps that are decided at a time. An action is all of them, and has
      one log-probability; the environment's action is [chunk, A] if chunk > 1.
    state_dependent_std: whether the standard deviation depends on the
      observation; otherwise it is a parameter.
    critic: whether the policy has a critic.
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
  check_continuous(env)
  low, high = (
    jnp.asarray(x * chunk, float) for x in (env.action_low, env.action_high)
  )
  networks = make_networks(
    cnn.encoder(env.obs_spec, camera_encoder, ignored),
    env.obs_spec,
    critic,
    mlp.Actor,
    A=low.shape[0],
    D=width,
    F=width,
    init_std=init_std,
    state_dependent_std=state_dependent_std,
  )
  squash = bounding == 'tanh'

  def distribution(params, x):
    mean, log_std = networks.actor(params, x)
    return mean, _broadcast(log_std, mean)

  def log_density(action, mean, log_std):
    logp = gaussian(action, mean, log_std)
    return logp - log_slope(action, low, high) if squash else logp

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del group_size  # Nothing is shared within a group.
    mean_BA, log_std_BA = distribution(params, networks.encode(params, obs))
    draw = functools.partial(jax.random.normal, shape=mean_BA.shape[1:])
    noise_BA = jax.vmap(draw)(key_B)
    sample_BA = mean_BA + jnp.exp(log_std_BA) * noise_BA
    action_BA = mean_BA if greedy else sample_BA
    logp_B = log_density(action_BA, mean_BA, log_std_BA)
    one_B = jnp.ones_like(logp_B)
    return base.Experience(obs, action_BA, logp_B, one_B, 0.0 * one_B)

  def evaluate(params, obs, action, *, group_size=1):
    del group_size
    x = networks.encode(params, obs)
    mean, log_std = distribution(params, x)
    entropy = gaussian_entropy(log_std)
    if squash:
      entropy += log_slope(mean, low, high)
    return base.Evaluation(
      log_density(action, mean, log_std),
      entropy,
      networks.value(params, x) if critic else None,
    )

  def value(params, obs):
    return networks.value(params, networks.encode(params, obs))

  to_env_action = functools.partial(bounded, squash, low, high, chunk)
  return base.Policy(
    networks.init, act, evaluate, to_env_action, value if critic else None
  )


class Networks(NamedTuple):
  """Actor and critic on one encoder, as functions of their parameters.

  Attributes:
    init: `key -> params`.
    encode: `params, obs -> x`, the input of actor and critic.
    actor: `params, x -> output`, that of its module.
    value: `params, x -> value`.
  """

  init: Callable
  encode: Callable
  actor: Callable
  value: Callable


def make_networks(
  encoder, obs_spec, critic: bool, module, **dimensions
) -> Networks:
  """Makes the networks of a policy.

  Args:
    encoder: of observations, as `cnn.encoder` makes it.
    obs_spec: shapes of one observation.
    critic: whether there is one.
    module: the class of the actor: `mlp.Actor` or `mlp.Logits`.
    **dimensions: those of `mlp.Config` but for `O`.
  """
  zero_obs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), obs_spec)
  encoded = jax.eval_shape(
    encoder.init_with_output, jax.random.key(0), zero_obs
  )[0]
  config = mlp.Config(O=encoded.shape[0], **dimensions)
  actor_net, critic_net = module(config), mlp.Critic(config)

  def init(key):
    actor_key, critic_key, encoder_key = jax.random.split(key, 3)
    zeros = jnp.zeros(encoded.shape, encoded.dtype)
    params = {'actor': actor_net.init(actor_key, zeros)['params']}
    if critic:
      params[base.CRITIC] = critic_net.init(critic_key, zeros)['params']
    if encoder.cameras:
      params['encoder'] = encoder.init(encoder_key, zero_obs)['params']
    return params

  def encode(params, obs):
    return encoder.apply({'params': params.get('encoder', {})}, obs)

  def actor(params, x):
    return actor_net.apply({'params': params['actor']}, x)

  def value(params, x):
    return critic_net.apply({'params': params[base.CRITIC]}, x)

  return Networks(init, encode, actor, value)


def check_continuous(env: base.Env):
  """Refuses an environment whose actions are choices.

  Raises:
    ValueError: for such an environment.
  """
  if env.action_choices:
    raise ValueError(
      'The actions of this environment are choices '
      f'({", ".join(map(str, env.action_choices))}), and these are numbers in '
      'a range: use categorical_policy.policy, with PPO or GRPO.'
    )


def gaussian(x, mean, log_std):
  """log N(x), summed over the last dimension.

  −½ ((x − μ) / σ)² − log σ − ½ log 2π
  """
  z = (x - mean) * jnp.exp(-log_std)
  return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std):
  """Σ ½ log 2πe + log σ, in nats."""
  return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def log_slope(x, low, high):
  """Σ log of the derivative of the squashed action by the sample `x`.

    log((high − low) / 2) + 2 (log 2 − x − softplus(−2x))

  The second term is log(1 − tanh² x), exact for large |x| too.
  """
  slope = 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))
  return (slope + _broadcast(jnp.log(0.5 * (high - low)), x)).sum(-1)


def bounded(squash: bool, low, high, chunk: int, action):
  """An action in −1 … 1 units, squashed or clipped, in low … high.

  A chunk of several steps becomes [chunk, A].
  """
  inside = jnp.tanh(action) if squash else jnp.clip(action, -1.0, 1.0)
  low, high = _broadcast(low, action), _broadcast(high, action)
  bounded = 0.5 * (low + high) + 0.5 * (high - low) * inside
  if chunk == 1:
    return bounded
  return bounded.reshape(*bounded.shape[:-1], chunk, -1)


def _broadcast(x, like):
  """A vector [A], or one a row, in the shape of `like`."""
  leading = (1,) * (like.ndim - x.ndim)
  return jnp.broadcast_to(x.reshape(leading + x.shape), like.shape)
