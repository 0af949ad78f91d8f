"""Random batches of log-probs, and slopes by central differences."""

import jax
import jax.numpy as jnp
import numpy as np

EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.
# A central difference over ±1e-5 is off by about 1e-11 times a third
# derivative, and by 1e-16 / 1e-5 of rounding.
SLOPE = {'rtol': 1e-7, 'atol': 1e-8}


def batch(seed, rows=8, tokens=6):
  """Log-probabilities now and before, advantages (one a row) and a mask."""
  rng = np.random.default_rng(seed)
  old = rng.normal(-2.0, 0.5, (rows, tokens))
  logp = old + rng.normal(0.0, 0.6, (rows, tokens))
  advantage = np.repeat(rng.normal(size=(rows, 1)), tokens, axis=1)
  mask = (rng.random((rows, tokens)) < 0.7).astype(float)
  mask[rows // 2] = 0.0  # A row without tokens counts too.
  return logp, old, advantage, mask


def slope(f, x, width=1e-5):
  """Gradient of a function of a NumPy array, by central differences."""
  gradient = np.zeros_like(x)
  for i in np.ndindex(x.shape):
    up, down = x.copy(), x.copy()
    up[i] += width
    down[i] -= width
    gradient[i] = (f(up) - f(down)) / (2 * width)
  return gradient


def agrees(ours, oracle, x, seed=0):
  """Value and gradient, weighted at random so that no two errors cancel."""
  weight = np.random.default_rng(seed).normal(size=x.shape)
  np.testing.assert_allclose(ours(jnp.asarray(x)), oracle(x), **EXACT)
  got = jax.grad(lambda x: (weight * ours(x)).sum())(jnp.asarray(x))
  want = slope(lambda x: (weight * oracle(x)).sum(), x)
  np.testing.assert_allclose(got, want, **SLOPE)
