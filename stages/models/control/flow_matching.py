"""Flow matching: actions are noise that follows a velocity field.

Time is that of openpi: 1 at the noise ε and 0 at the action a. It is 1 − τ of
π0's paper, arXiv:2410.24164.

  xₜ = t ε + (1 − t) a,   v = ε − a = dxₜ/dt

A network learns the mean of v given xₜ. Integrating it from t = 1 to 0 turns
noise into an action. Arrays are [..., A], where A is all numbers of a chunk of
actions, and times are [...].

For reinforcement learning, a step of the integration becomes stochastic, so
that it has a probability: π_RL, arXiv:2510.25889.
"""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

# Of sin and cos in time embeddings, as in openpi.
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
TIME_ALPHA = 1.5  # Of the Beta distribution of training times.
LEAST_TIME = 1e-3  # Training times lie between this and one.


def time_embedding(
  t, width: int, min_period: float = MIN_PERIOD, max_period: float = MAX_PERIOD
):
  """Sines, then cosines, of a time: `[...] -> [..., width]`.

    sin(2π t / pᵢ),   cos(2π t / pᵢ),   pᵢ = p_min (p_max / p_min)^(i / (n − 1))

  with n = width / 2 periods.
  """
  if width % 2:
    raise ValueError(
      f'A time embedding of {width} features cannot be half sines and half '
      'cosines: make its width even.'
    )
  t = jnp.asarray(t, float)[..., None]
  fraction = jnp.linspace(0.0, 1.0, width // 2).reshape((1,) * t.ndim + (-1,))
  period = min_period * (max_period / min_period) ** fraction[0]
  angle = 2 * jnp.pi * t / period
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def draw_time(key, alpha: float = TIME_ALPHA):
  """A training time: 0.001 + 0.999 · Beta(α, 1), mostly near the noise.

  The distribution function of Beta(α, 1) is tᵅ, which is inverted.
  """
  uniform = jax.random.uniform(key, dtype=float)
  return LEAST_TIME + (1.0 - LEAST_TIME) * uniform ** (1.0 / alpha)


def matching_loss(velocity: Callable, action, noise, t):
  """Mean over A of (v(xₜ, t) − (ε − a))², arXiv:2410.24164 eq. 1, [...].

  Args:
    velocity: `x, t -> v`.
    action: a.
    noise: ε.
    t: times.
  """
  x = t[..., None] * noise + (1.0 - t[..., None]) * action
  return ((velocity(x, t) - (noise - action)) ** 2).mean(-1)


def step_time(k, num_steps: int):
  """The time before step k of K: 1 − k / K."""
  return 1.0 - k / num_steps


def euler_step(x, v, num_steps: int):
  """x − v / K: one step of K along the velocity."""
  return x - v / num_steps


def denoise(step: Callable, noise, num_steps: int):
  """Makes K steps from noise.

  Args:
    step: `x, k -> next x, aux`; k is an int32 scalar.
    noise: x at time 1.
    num_steps: K.

  Returns:
    x before and after all steps, [..., K + 1, A], and what steps returned
    beside it, stacked over a new first dimension.
  """

  def body(x, k):
    x, aux = step(x, k)
    return x, (x, aux)

  _, (path, aux) = jax.lax.scan(body, noise, jnp.arange(num_steps))
  path = jnp.concatenate([noise[None], path])
  return jnp.moveaxis(path, 0, -2), aux


def sde_step(x, v, k, num_steps: int, noise_level: float):
  """Mean and standard deviation of the Flow-SDE step k, arXiv:2510.25889 §4.2.

    x̂₀ = x − v t,   x̂₁ = x + v (1 − t),   σ = a √(t / (1 − t)),   d = 1 / K
    μ = x̂₀ (1 − (t − d)) + x̂₁ (t − d − σ² d / 2t)
    next x ~ N(μ, σ² d)

  In the limit of small d, x has at each time the distribution that the ODE
  gives it. At t = 1, where σ is infinite, its denominator is taken at the next
  time: σ = a √(1 / d). The first step therefore multiplies the variance of the
  noise by 1 + a⁴ / 4 for any d; later steps reduce this error as K^(−a²).

  Args:
    x: before the step.
    v: the velocity there.
    k: number of the step, [...] or a scalar; t is 1 − k / K.
    num_steps: K.
    noise_level: a.
  """
  step = 1.0 / num_steps
  k = jnp.broadcast_to(jnp.asarray(k), x.shape[:-1])[..., None]
  t = step_time(k, num_steps).astype(x.dtype)
  # 1 − t from whole numbers: a difference of floats would be rounded.
  past = jnp.maximum(k, 1).astype(x.dtype) / num_steps
  variance = noise_level**2 * t / past
  action, noise = x - v * t, x + v * (1.0 - t)
  mean = action * (1.0 - (t - step)) + noise * (
    t - step - variance * step / (2.0 * t)
  )
  return mean, jnp.broadcast_to(jnp.sqrt(variance * step), x.shape)


def bounded_log_std(x, least: float, most: float):
  """log σ between the logarithms of two bounds, by tanh x: Flow-Noise's.

  It is RLinf's: log σ = log σ_min + (tanh x + 1) / 2 · log(σ_max / σ_min).
  """
  return math.log(least) + 0.5 * (jnp.tanh(x) + 1.0) * math.log(most / least)
