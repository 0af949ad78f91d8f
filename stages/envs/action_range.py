"""The range of an environment's continuous actions, and units of −1 … 1."""

import math

import jax
import jax.numpy as jnp

from stages.envs import env as env_lib


def bounds(env: env_lib.Env, chunk: int = 1) -> tuple[jax.Array, jax.Array]:
  """Least and greatest actions [A], repeated for each step of a chunk.

  Raises:
    ValueError: if the environment's actions are choices, or a number of an
      action has no range.
  """
  check_continuous(env)
  lows, highs = len(env.action_low), len(env.action_high)
  if lows != highs:
    raise ValueError(
      f'Actions of this environment have {lows} lower and {highs} upper '
      'bounds: declare one of each for every number.'
    )
  for i, (a, b) in enumerate(zip(env.action_low, env.action_high, strict=True)):
    if not -math.inf < a <= b < math.inf:
      raise ValueError(
        f'Number {i} of an action of this environment is between {a} and {b}, '
        'which is no range for a policy to fill: declare finite bounds of its '
        'actions.'
      )
  low, high = (
    jnp.asarray(x * chunk, float) for x in (env.action_low, env.action_high)
  )
  return low, high


def check_continuous(env: env_lib.Env):
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


def check_chunk(action, chunk: int):
  """Refuses demonstrated actions that are not chunks of `chunk` actions."""
  got = action.shape[1] if action.ndim == 3 else 1
  if got != chunk:
    raise ValueError(
      f'The policy decides chunks of {chunk} actions, and a row of the '
      f'demonstrations has {got}: record them with `chunk = {chunk}`.'
    )


def bounded(squash: bool, low, high, chunk: int, action):
  """An action in −1 … 1 units, squashed or clipped, in low … high.

  A chunk of several steps becomes [chunk, A].
  """
  inside = jnp.tanh(action) if squash else jnp.clip(action, -1.0, 1.0)
  low, high = broadcast(low, action), broadcast(high, action)
  bounded = 0.5 * (low + high) + 0.5 * (high - low) * inside
  if chunk == 1:
    return bounded
  return bounded.reshape(*bounded.shape[:-1], chunk, -1)


def log_slope(x, low, high):
  """Log of the derivative of each squashed number by the sample `x`.

    log((high − low) / 2) + 2 (log 2 − x − softplus(−2x))

  The second term is log(1 − tanh² x), exact for large |x| too.
  """
  slope = 2.0 * (math.log(2.0) - x - jax.nn.softplus(-2.0 * x))
  return slope + broadcast(jnp.log(0.5 * (high - low)), x)


def broadcast(x, like):
  """A vector [A], or one a row, in the shape of `like`."""
  leading = (1,) * (like.ndim - x.ndim)
  return jnp.broadcast_to(x.reshape(leading + x.shape), like.shape)
