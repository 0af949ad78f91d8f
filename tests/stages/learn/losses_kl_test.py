"""Estimates of a KL divergence, and weights of importance sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.learn import losses
from tests.stages.learn import loss_cases

EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def test_kl_estimates_are_of_the_policy_from_the_reference():
  logp, ref_logp = jnp.log(0.5), jnp.log(0.25)  # Δ = log 2
  delta = np.log(2.0)
  np.testing.assert_allclose(losses.kl_k1(logp, ref_logp), delta, **EXACT)
  np.testing.assert_allclose(
    losses.kl_k2(logp, ref_logp), delta**2 / 2, **EXACT
  )
  np.testing.assert_allclose(
    losses.kl_k3(logp, ref_logp), 0.5 - 1 + delta, **EXACT
  )


def distributions(seed, size=7):
  logit, ref_logit = jnp.asarray(
    np.random.default_rng(seed).normal(size=(2, size))
  )
  kl = lambda x: jnp.vdot(
    jax.nn.softmax(x), jax.nn.log_softmax(x) - jax.nn.log_softmax(ref_logit)
  )
  return logit, jax.nn.log_softmax(ref_logit), kl


@pytest.mark.parametrize('estimate', [losses.kl_k1, losses.kl_k3])
@pytest.mark.parametrize('seed', range(3))
def test_k1_and_k3_are_the_divergence_on_average(estimate, seed):
  logit, ref_logp, kl = distributions(seed)
  logp = jax.nn.log_softmax(logit)
  got = jnp.vdot(jnp.exp(logp), estimate(logp, ref_logp))
  np.testing.assert_allclose(got, kl(logit), **EXACT)


@pytest.mark.parametrize('seed', range(3))
def test_k2_descends_the_divergence_on_average(seed):
  logit, ref_logp, kl = distributions(seed)
  drawn = jax.nn.softmax(logit)  # Held still, as samples are.
  got = jax.grad(
    lambda x: jnp.vdot(drawn, losses.kl_k2(jax.nn.log_softmax(x), ref_logp))
  )(logit)
  np.testing.assert_allclose(got, jax.grad(kl)(logit), **EXACT)


def test_gradients_of_the_kl_estimates():
  logp, ref_logp, _, _ = loss_cases.batch(7)
  oracles = {
    losses.kl_k1: lambda delta: delta,
    losses.kl_k2: lambda delta: delta * delta / 2,
    losses.kl_k3: lambda delta: np.exp(-delta) - 1 + delta,
  }
  for estimate, oracle in oracles.items():
    loss_cases.agrees(
      functools.partial(estimate, ref_logp=ref_logp),
      lambda x, oracle=oracle: oracle(x - ref_logp),
      logp,
    )


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_k3_is_never_negative(dtype):
  size = np.logspace(-12, 1, 2001)
  delta = jnp.asarray(np.concatenate([-size, [0.0], size]), dtype)
  k3 = losses.kl_k3(delta, jnp.zeros_like(delta))
  assert (k3 >= 0).all()
  assert k3[2001] == 0


def test_k3_of_tokens_that_the_policy_nearly_lost_is_finite():
  delta = jnp.array([-19.9, -20.0, -20.1, -21.0, -89.0, -1e4], jnp.float32)
  k3, slope = jax.vmap(jax.value_and_grad(losses.kl_k3), (0, None))(delta, 0.0)
  assert k3.dtype == slope.dtype == jnp.float32
  near, far = slice(0, 2), slice(2, None)
  exact = np.exp(-np.asarray(delta[near], np.float64))
  np.testing.assert_allclose(k3[near], exact - 1 + delta[near], rtol=1e-5)
  np.testing.assert_allclose(slope[near], 1 - exact, rtol=1e-5)
  # The tangent at −20, below k3.
  np.testing.assert_allclose(slope[far], 1 - np.exp(20.0), rtol=1e-6)
  tangent = np.exp(20.0) - 21 + (1 - np.exp(20.0)) * (delta[far] + 20.0)
  np.testing.assert_allclose(k3[far], tangent, rtol=1e-5)


@pytest.mark.parametrize('seed', range(3))
def test_weights_are_products_of_what_each_token_weighs(seed):
  old, drawn, _, mask = loss_cases.batch(seed)
  token, sequence, geometric = (np.ones_like(old) for _ in range(3))
  for b in range(8):
    real = [t for t in range(6) if mask[b, t]]
    for t in real:
      token[b, t] = np.exp(old[b, t]) / np.exp(drawn[b, t])
    sequence[b] = np.prod(token[b, real])
    geometric[b] = np.prod(token[b, real]) ** (1 / max(len(real), 1))
  for weigh, want in [
    (losses.token_weight, token),
    (losses.sequence_weight, sequence),
    (losses.geometric_weight, geometric),
  ]:
    np.testing.assert_allclose(weigh(old, drawn, mask), want, **EXACT)


@pytest.mark.parametrize(
  'weigh',
  [losses.token_weight, losses.sequence_weight, losses.geometric_weight],
)
@pytest.mark.parametrize('bound', [losses.truncated, losses.masked])
def test_no_gradient_passes_through_a_weight(weigh, bound):
  old, drawn, _, mask = loss_cases.batch(8)
  gradient = jax.grad(lambda x: bound(weigh(x, drawn, mask), 2.0).sum())(old)
  np.testing.assert_array_equal(gradient, 0.0)


def test_weights_are_truncated_or_masked():
  weight = jnp.array([0.0, 0.24, 0.25, 1.0, 4.0, 4.1, jnp.inf])
  np.testing.assert_array_equal(
    losses.truncated(weight, 4.0), [0.0, 0.24, 0.25, 1.0, 4.0, 4.0, 4.0]
  )
  np.testing.assert_array_equal(
    losses.masked(weight, 4.0), [0.0, 0.0, 0.25, 1.0, 4.0, 0.0, 0.0]
  )


def test_a_masked_weight_counts_in_the_denominator():
  weight = losses.masked(jnp.array([[1.0, 9.0]]), 2.0)
  assert losses.token_mean(3.0 * weight, jnp.ones((1, 2))) == (3.0, 2.0)


@pytest.mark.parametrize(
  'weight',
  [losses.token_weight, losses.sequence_weight, losses.geometric_weight],
)
def test_padding_changes_no_importance_weight(weight):
  """Its log-probabilities are arbitrary, and may be infinite."""
  mask = jnp.array([[1.0, 0.0]])
  behavior = jnp.array([[-1.5, -1.0]])
  got = weight(jnp.array([[-1.0, -jnp.inf]]), behavior, mask)
  np.testing.assert_allclose(got[0, 0], np.exp(0.5), rtol=1e-6)
