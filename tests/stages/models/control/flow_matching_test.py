"""Flow matching where all is known: actions of a Gaussian distribution.

With a ~ N(m, s²), xₜ ~ N((1 − t) m, t² + (1 − t)² s²), and the velocity is
linear in x. So is each step, whose mean and variance are then exact.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.models.control import flow_matching

MEAN, STD = 0.7, 0.4
LEVEL = 0.5

pytestmark = pytest.mark.usefixtures('in_float64')


def velocity(x, t):
  """E[ε − a | xₜ = x]."""
  t = t[..., None]
  variance = t**2 + (1 - t) ** 2 * STD**2
  slope = (t - (1 - t) * STD**2) / variance
  return slope * (x - (1 - t) * MEAN) - MEAN


def moments(all_steps, noise_level: float):
  """Exact mean and standard deviation of actions, for each number of steps."""
  k = jnp.concatenate([jnp.arange(K) for K in all_steps])
  K = jnp.repeat(jnp.array(all_steps), jnp.array(all_steps)).astype(float)
  x = jnp.broadcast_to(jnp.array([0.0, 1.0])[:, None, None], (2, len(k), 1))
  v = velocity(x, jnp.broadcast_to((1.0 - k / K)[None], x.shape[:2]))
  if noise_level:
    (start, end), (std, _) = flow_matching.sde_step(
      x, v, k[None], K[None, :, None], noise_level
    )
  else:
    start, end = flow_matching.euler_step(x, v, K[None, :, None])
    std = 0.0 * start
  steps = np.concatenate([start, end - start, std], axis=1)
  for some in np.split(steps, np.cumsum(all_steps)[:-1]):
    mean, variance = 0.0, 1.0
    for offset, slope, std in some:
      mean, variance = offset + slope * mean, slope**2 * variance + std**2
    yield mean, math.sqrt(variance)


def distance(a, b) -> float:
  """2-Wasserstein distance of two Gaussians, by mean and deviation."""
  return math.hypot(a[0] - b[0], a[1] - b[1])


def test_an_sdes_actions_are_distributed_as_the_odes_as_steps_grow():
  want, Ks = (MEAN, STD), (4, 10, 100, 500, 2000)
  for level in (0.0, LEVEL):
    gaps = [distance(x, want) for x in moments(Ks, level)]
    print('noise', level, dict(zip(Ks, gaps, strict=True)))
    assert gaps[0] < 0.15 and gaps[1] < 0.07 and gaps[2] < 0.007
    assert max(gaps[3:]) < 1.5e-3


def test_samples_of_both_samplers_agree_within_monte_carlo_error():
  N, K = 4096, 500
  noise = jax.random.normal(jax.random.key(0), (N, 1))

  def stochastic(x, k):
    t = jnp.full(N, flow_matching.step_time(k, K))
    mean, std = flow_matching.sde_step(x, velocity(x, t), k, K, LEVEL)
    key = jax.random.fold_in(jax.random.key(1), k)
    return mean + std * jax.random.normal(key, x.shape), ()

  path, _ = jax.jit(lambda x: flow_matching.denoise(stochastic, x, K))(noise)
  sde = np.asarray(path[:, -1, 0])
  ode = np.asarray(noise)
  for k in range(K):
    ode = ode - np.asarray(velocity(ode, np.full(N, 1.0 - k / K))) / K
  assert path.shape == (N, K + 1, 1)
  error = STD / math.sqrt(N)
  for x in (sde, ode[:, 0]):
    assert abs(x.mean() - MEAN) < 4 * error
    assert abs(x.std() - STD) < 4 * error / math.sqrt(2)
  # Not the same samples, though: the noise is new.
  assert np.corrcoef(sde, ode[:, 0])[0, 1] < 0.9


def test_a_stochastic_step_is_that_of_the_paper():
  """By the formula, in plain numbers."""
  x, v, K, a = 0.3, -1.1, 4, 0.5
  for k in range(K):
    t, d = 1 - k / K, 1 / K
    sigma = a * math.sqrt(t / (1 - t if k else d))
    mean = (x - v * t) * (1 - (t - d)) + (x + v * (1 - t)) * (
      t - d - sigma**2 * d / (2 * t)
    )
    got = flow_matching.sde_step(jnp.array([x]), jnp.array([v]), k, K, a)
    np.testing.assert_allclose(got, [[mean], [sigma * math.sqrt(d)]])


def test_a_stochastic_step_without_noise_is_eulers():
  x, v = jnp.array([[0.3], [2.0]]), jnp.array([[1.0], [-2.0]])
  mean, _ = flow_matching.sde_step(x, v, 2, 5, 1e-9)
  np.testing.assert_allclose(mean, flow_matching.euler_step(x, v, 5))


def test_embedded_times_are_those_of_openpi():
  t, width = np.array([0.0, 0.25, 0.999]), 6
  period = 4e-3 * (4.0 / 4e-3) ** np.linspace(0, 1, width // 2)
  angle = 2 * np.pi * t[:, None] / period
  want = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
  got = flow_matching.time_embedding(jnp.asarray(t), width)
  np.testing.assert_allclose(got, want, atol=1e-9)
  with pytest.raises(ValueError, match='make its width even'):
    flow_matching.time_embedding(jnp.asarray(t), 5)


def test_training_times_have_the_beta_distribution():
  keys = jax.random.split(jax.random.key(0), 20_000)
  t = np.asarray(jax.vmap(flow_matching.draw_time)(keys))
  assert 0.001 <= t.min() and t.max() <= 1.0
  # Beta(α, 1) has the mean α / (α + 1) and the variance α / (α+1)² (α+2).
  unit = (t - 0.001) / 0.999
  np.testing.assert_allclose(unit.mean(), 1.5 / 2.5, atol=0.006)
  np.testing.assert_allclose(unit.var(), 1.5 / (2.5**2 * 3.5), atol=0.003)


def test_the_loss_is_least_at_the_conditional_mean_of_the_velocity():
  N = 20_000
  keys = jax.random.split(jax.random.key(0), 3)
  noise, unit = (jax.random.normal(key, (N, 1)) for key in keys[:2])
  action, t = MEAN + STD * unit, jax.random.uniform(keys[2], (N,))
  loss = functools.partial(
    flow_matching.matching_loss, action=action, noise=noise, t=t
  )
  best = loss(velocity).mean()
  for change in (
    lambda x, t: velocity(x, t) + 0.1,
    lambda x, t: 1.1 * velocity(x, t),
  ):
    assert loss(change).mean() > best + 0.005
  # With the action and the noise in x, at the two ends.
  zero = lambda x, t: x
  np.testing.assert_allclose(
    flow_matching.matching_loss(zero, action, noise, jnp.zeros(N)),
    ((2 * action - noise) ** 2)[:, 0],
  )
