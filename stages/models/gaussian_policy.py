"""A robot's policy: what is seen and felt in, vectors out."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from stages import base
from stages.models import cnn, mlp


def policy(
  world: base.Env,
  *,
  width: int = 64,
  init_std: float = 1.0,
  bounding: Literal['clip', 'tanh'] = 'clip',
  chunk: int = 1,
  state_dependent_std: bool = False,
  critic: bool = True,
  camera_encoder: cnn.Config = cnn.Config(),
  ignored: tuple[str, ...] = (),
) -> base.Policy:
  """The policy that two small networks are, for what a world shows and takes.

  Where it shows pictures, both read what one encoder makes of them, which
  learns from both; vectors go to them as they are.

  Actions are drawn from a Gaussian, where −1 … 1 of each dimension is the range
  that the world has for it. An `action` is what was drawn, so that its
  probability can be told exactly; the `command` is that within the range.

  Args:
    world: whose observations are vectors and pictures, alone or by name.
    width: of the hidden layers.
    init_std: of actions at the beginning, where 1 is half of the range.
    bounding: 'clip' cuts samples off at the range, and a log-probability is the
      Gaussian's. 'tanh' squashes it, and a log-probability is that of the
      command; entropy has no closed form then, and is the Gaussian's with the
      squash as it is at the mean.
    chunk: steps that are decided at a time. An action is all of them, and so is
      its log-probability; a command is [chunk, A], if there are several.
    state_dependent_std: whether the deviation depends on what is seen.
    critic: whether it estimates what is to be expected.
    camera_encoder: the network of a camera, if there is one.
    ignored: names of what the world shows and it shall not read, such as an
      instruction that is always the same.
  """
  if bounding not in ('clip', 'tanh'):
    raise ValueError(
      f"Actions can be bound by 'clip' or 'tanh', and not by {bounding!r}."
    )
  low, high = (
    jnp.asarray(x * chunk, float) for x in (world.action_low, world.action_high)
  )
  encoder = cnn.encoder(world.obs_spec, camera_encoder, ignored)
  like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), world.obs_spec)
  seen = jax.eval_shape(encoder.init_with_output, jax.random.key(0), like)[0]
  config = mlp.Config(
    *(seen.shape[0], low.shape[0], width, width, init_std, state_dependent_std)
  )
  actor, judge = mlp.Actor(config), mlp.Critic(config)
  squash = bounding == 'tanh'

  def init(key):
    ours, theirs, eyes = jax.random.split(key, 3)
    zeros = jnp.zeros(seen.shape, seen.dtype)
    params = {'actor': actor.init(ours, zeros)['params']}
    if critic:
      params[base.CRITIC] = judge.init(theirs, zeros)['params']
    if encoder.cameras:
      params['encoder'] = encoder.init(eyes, like)['params']
    return params

  def encode(params, obs):
    return encoder.apply({'params': params.get('encoder', {})}, obs)

  def mean(params, x):
    mean, log_std = actor.apply({'params': params['actor']}, x)
    return mean, _wide(log_std, mean)

  def expect(params, x):
    return judge.apply({'params': params[base.CRITIC]}, x)

  def density(action, mean, log_std):
    logp = gaussian(action, mean, log_std)
    return logp - log_slope(action, low, high) if squash else logp

  def act(params, obs, key_B, *, group_size=1, greedy=False):
    del group_size  # Nothing is read only once.
    mean_BA, log_std_BA = mean(params, encode(params, obs))
    draw = functools.partial(jax.random.normal, shape=mean_BA.shape[1:])
    noise_BA = jax.vmap(draw)(key_B)
    drawn_BA = mean_BA + jnp.exp(log_std_BA) * noise_BA
    action_BA = mean_BA if greedy else drawn_BA
    logp_B = density(action_BA, mean_BA, log_std_BA)
    one_B = jnp.ones_like(logp_B)
    return base.Experience(obs, action_BA, logp_B, one_B, 0.0 * one_B)

  def evaluate(params, obs, action, *, group_size=1):
    del group_size
    x = encode(params, obs)
    mean_, log_std = mean(params, x)
    entropy = gaussian_entropy(log_std)
    if squash:
      entropy += log_slope(mean_, low, high)
    return base.Evaluation(
      density(action, mean_, log_std),
      entropy,
      expect(params, x) if critic else None,
    )

  def value(params, obs):
    return expect(params, encode(params, obs))

  def to_env_action(action):
    told = _command(squash, low, high, action)
    return told if chunk == 1 else told.reshape(*told.shape[:-1], chunk, -1)

  return base.Policy(
    init, act, evaluate, to_env_action, value if critic else None
  )


def gaussian(x, mean, log_std):
  """log N(x), added over the last dimension.

  −½ ((x − μ) / σ)² − log σ − ½ log 2π
  """
  z = (x - mean) * jnp.exp(-log_std)
  return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std):
  """Σ ½ log 2πe + log σ, in nats."""
  return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def log_slope(x, low, high):
  """Σ log of how fast a squashed action changes with what was drawn.

    log((high − low) / 2) + 2 (log 2 − x − softplus(−2x))

  The second term is log(1 − tanh² x), exact far out too.
  """
  slope = 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))
  return (slope + _wide(jnp.log(0.5 * (high - low)), x)).sum(-1)


def _command(squash: bool, low, high, action):
  """What was drawn, within the bounds."""
  inside = jnp.tanh(action) if squash else jnp.clip(action, -1.0, 1.0)
  low, high = _wide(low, action), _wide(high, action)
  return 0.5 * (low + high) + 0.5 * (high - low) * inside


def _wide(x, like):
  """A vector, once for all rows and steps of `like`; or one a row."""
  ahead = (1,) * (like.ndim - x.ndim)
  return jnp.broadcast_to(x.reshape(ahead + x.shape), like.shape)
