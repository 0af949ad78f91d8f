"""Advantages of tokens: an oracle by double sums, and laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.learn import advantages

EXACT = {'rtol': 1e-12, 'atol': 1e-12}
LENGTHS = (1, 2, 5, 8)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def rows(seed=0, T=8):
  """Rewards and values of completions of `LENGTHS`; NaN on padding."""
  rng = np.random.default_rng(seed)
  mask = (np.arange(T) < np.array(LENGTHS)[:, None]).astype(float)
  reward, value = np.where(mask, rng.normal(size=(2, *mask.shape)), np.nan)
  return reward, value, mask


def double_sum(reward, value, length, discount, lambda_):
  """Σₖ≥ₜ (γλ)ᵏ⁻ᵗ δₖ of the real tokens alone."""
  reward, value = reward[:length], value[:length]
  delta = reward + discount * np.append(value[1:], 0.0) - value
  return [
    sum((discount * lambda_) ** (k - t) * delta[k] for k in range(t, length))
    for t in range(length)
  ]


token_gae = jax.jit(jax.vmap(advantages.token_gae, (0, 0, 0, None, None)))


@pytest.mark.parametrize('discount, lambda_', [(1.0, 0.95), (0.9, 0.5)])
def test_token_gae_is_the_double_sum_of_the_real_tokens(discount, lambda_):
  reward, value, mask = rows()
  got = np.asarray(token_gae(reward, value, mask, discount, lambda_))
  for i, length in enumerate(LENGTHS):
    want = double_sum(reward[i], value[i], length, discount, lambda_)
    np.testing.assert_allclose(got[i, :length], want, **EXACT)
    assert not got[i, length:].any()


def test_padding_changes_no_advantage():
  short = rows()
  longer = [np.pad(x, ((0, 0), (0, 3)), constant_values=0) for x in short]
  longer[0][:, 8:] = np.inf
  longer[1][:, 8:] = 7.0
  got, want = (token_gae(*x, 1.0, 0.9) for x in (longer, short))
  np.testing.assert_array_equal(got[:, :8], want)


def test_with_lambda_one_a_token_has_the_reward_minus_its_value():
  _, value, mask = rows()
  reward = jax.vmap(advantages.at_last_token)(np.arange(4.0), mask)
  got = token_gae(reward, value, mask, 1.0, 1.0)
  want = np.where(mask, np.arange(4.0)[:, None] - value, 0.0)
  np.testing.assert_allclose(got, want, **EXACT)


def test_the_reward_is_on_the_last_real_token():
  mask = jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
  got = jax.vmap(advantages.at_last_token)(jnp.array([2.0, 3.0, np.nan]), mask)
  np.testing.assert_array_equal(got, [[0, 2, 0], [0, 0, 3], [0, 0, 0]])


def test_the_lambda_of_vapo_is_worked_by_hand():
  got = advantages.length_adaptive(0.05)(jnp.array([10.0, 40.0, 2000.0]))
  np.testing.assert_allclose(got, [0.0, 0.5, 0.99], **EXACT)


def test_tokens_of_an_environment_are_left_out():
  """A row with gaps has the advantages of its own tokens without them."""
  rng = np.random.default_rng(5)
  mask = np.array([1.0, 1, 0, 0, 1, 0, 1, 1, 0, 0])
  reward, value = np.where(mask, rng.normal(size=(2, 10)), np.nan)
  discount = np.where(mask, rng.uniform(0.5, 1.0, 10), np.nan)
  got = advantages.token_gae(reward, value, mask, discount, 0.8)
  own = mask > 0
  together = np.ones(int(mask.sum()))
  want = advantages.token_gae(
    reward[own], value[own], together, discount[own], 0.8
  )
  np.testing.assert_allclose(got[own], want, **EXACT)
  assert not got[~own].any()
