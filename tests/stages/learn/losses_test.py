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


@np.vectorize
def surrogate(ratio, advantage, low, high, dual=np.inf):
  """By cases, as a person would say it."""
  if advantage >= 0:
    return -advantage * min(ratio, 1 + high)
  return -advantage * min(max(ratio, 1 - low), dual)


def mean_log_ratio(logp, old, mask):
  mean = np.zeros_like(logp)
  for b in range(len(logp)):
    real = [t for t in range(logp.shape[1]) if mask[b, t]]
    gaps = [logp[b, t] - old[b, t] for t in real]
    mean[b] = sum(gaps) / max(len(gaps), 1)
  return mean


def test_ratio_is_of_probabilities_and_finite():
  logp = jnp.log(jnp.array([0.5, 0.25, 1.0, 1.0]))
  old_logp = jnp.array([jnp.log(0.25), jnp.log(0.5), -100.0, 100.0])
  want = [2.0, 0.5, np.exp(20.0), np.exp(-20.0)]
  np.testing.assert_allclose(losses.ratio(logp, old_logp), want, **EXACT)


@pytest.mark.parametrize('low, high', [(0.2, 0.2), (0.2, 0.28), (0.5, 0.1)])
@pytest.mark.parametrize('dual', [None, 1.5])
def test_ppo_clip_is_its_cases(low, high, dual):
  logp, old, advantage, _ = loss_cases.batch(0)
  loss_cases.agrees(
    lambda x: losses.ppo_clip(x, old, advantage, low, high, dual),
    lambda x: surrogate(np.exp(x - old), advantage, low, high, dual or np.inf),
    logp,
  )


def test_ppo_clip_by_hand():
  ratio = np.array([2.0, 2.0, 0.5, 0.5, 1.1, 10.0])
  advantage = np.array([1.0, -1.0, 1.0, -1.0, -2.0, -2.0])
  want = np.array([-1.28, 2.0, -0.5, 0.8, 2.2, 20.0])
  loss = functools.partial(
    losses.ppo_clip, np.log(ratio), np.zeros(6), advantage
  )
  np.testing.assert_allclose(loss(0.2, 0.28), want, **EXACT)
  want[-1] = 6.0  # −3 · −2
  np.testing.assert_allclose(loss(0.2, 0.28, dual_clip=3.0), want, **EXACT)


def test_ppo_clip_on_policy_is_the_policy_gradient():
  logp, _, advantage, _ = loss_cases.batch(1)
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, logp, advantage, 0.2, 0.2).sum()
  )(logp)
  np.testing.assert_array_equal(gradient, -advantage)


@pytest.mark.parametrize('seed', range(3))
def test_gspo_clips_whole_sentences(seed):
  logp, old, advantage, mask = loss_cases.batch(seed)

  def oracle(x):
    ratio = np.exp(mean_log_ratio(x, old, mask))
    return surrogate(ratio, advantage, 0.1, 0.15)

  loss_cases.agrees(
    lambda x: losses.ppo_clip(
      losses.sequence_logp(x, mask),
      losses.sequence_logp(old, mask),
      advantage,
      clip_low=0.1,
      clip_high=0.15,
    ),
    oracle,
    logp,
  )


def test_gspo_by_hand():
  # The geometric mean of 4 and 1 is 2, clipped to 1.5; 7 is of padding.
  logp, old = jnp.log(jnp.array([[4.0, 1.0, 7.0]])), jnp.zeros((1, 3))
  mask, one = jnp.array([[1.0, 1.0, 0.0]]), jnp.ones((1, 3))
  per_row = losses.sequence_logp(logp, mask), losses.sequence_logp(old, mask)
  np.testing.assert_allclose(losses.ratio(*per_row), 2 * one, **EXACT)
  loss = losses.ppo_clip(*per_row, 3 * one, 0.5, 0.5)
  np.testing.assert_allclose(loss, -4.5 * one, **EXACT)
  mean = losses.sequence_mean_token_mean(loss, mask)
  np.testing.assert_allclose((mean.sum, mean.count), (-4.5, 1.0), **EXACT)


@pytest.mark.parametrize('seed', range(3))
def test_rloo_clips_the_ratio_of_whole_completions(seed):
  logp, old, _, mask = loss_cases.batch(seed)
  advantage_B = np.random.default_rng(seed).normal(size=len(logp))

  def oracle(x):
    losses_B = []
    for b in range(len(x)):
      real = [t for t in range(x.shape[1]) if mask[b, t]]
      ratio = np.exp(sum(x[b, t] - old[b, t] for t in real))
      loss = surrogate(ratio, advantage_B[b], 0.2, 0.2)
      losses_B.append(loss if real else 0.0)
    return sum(losses_B) / len(losses_B)

  def ours(x):
    loss = losses.ppo_clip(
      losses.sequence_sum_logp(x, mask),
      losses.sequence_sum_logp(old, mask),
      jnp.broadcast_to(advantage_B[:, None], x.shape),
      clip_low=0.2,
      clip_high=0.2,
    )
    mean = losses.sequence_mean_token_mean(loss, mask)
    return mean.sum / mean.count

  np.testing.assert_allclose(ours(logp), oracle(logp), **EXACT)
  got = jax.grad(ours)(jnp.asarray(logp))
  np.testing.assert_allclose(
    got, loss_cases.slope(oracle, logp), **loss_cases.SLOPE
  )


def test_cispo_weighs_a_policy_gradient_and_never_stops_it():
  logp, old, advantage, _ = loss_cases.batch(3)
  weight = np.clip(np.exp(logp - old), 0.7, 1.28)
  loss = lambda x: losses.cispo(x, old, advantage, 0.3, 0.28)
  np.testing.assert_allclose(loss(logp), -weight * advantage * logp, **EXACT)
  gradient = jax.grad(lambda x: loss(x).sum())(logp)
  np.testing.assert_allclose(gradient, -weight * advantage, **EXACT)
  assert (gradient != 0).all()


def test_reinforce_by_hand():
  logp, advantage = jnp.array([-1.0, -2.0]), jnp.array([3.0, -0.5])
  np.testing.assert_array_equal(losses.reinforce(logp, advantage), [3.0, -1.0])
  gradient = jax.grad(lambda x: losses.reinforce(x, advantage).sum())(logp)
  np.testing.assert_array_equal(gradient, -advantage)


def test_cispo_on_policy_is_reinforce():
  logp, _, advantage, _ = loss_cases.batch(4)
  np.testing.assert_array_equal(
    losses.cispo(logp, logp, advantage, 1.0, 0.2),
    losses.reinforce(logp, advantage),
  )


@pytest.mark.parametrize('low, high', [(0.2, 0.2), (0.1, 0.4)])
def test_clip_fraction_is_where_the_gradient_is_cut(low, high):
  logp, old, advantage, _ = loss_cases.batch(5, rows=32)
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, old, advantage, low, high).sum()
  )(logp)
  got = losses.clip_fraction(logp, old, advantage, low, high)
  np.testing.assert_array_equal(got, gradient == 0)
  assert 0.1 < got.mean() < 0.9


def test_dual_clip_fraction_is_what_the_dual_clip_cuts_besides():
  logp, old, advantage, _ = loss_cases.batch(6, rows=32)
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, old, advantage, 0.2, 0.2, 1.5).sum()
  )(logp)
  single = losses.clip_fraction(logp, old, advantage, 0.2, 0.2)
  dual = losses.dual_clip_fraction(logp, old, advantage, 1.5)
  np.testing.assert_array_equal(single + dual, gradient == 0)
  assert 0.05 < dual.mean() < 0.5


def test_clip_fraction_by_hand():
  logp = jnp.log(jnp.array([0.7, 0.7, 1.3, 1.3, 1.0]))
  advantage = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0])
  cut = lambda a: losses.clip_fraction(logp, jnp.zeros(5), a, 0.2, 0.2)
  np.testing.assert_array_equal(cut(advantage), [0, 1, 1, 0, 0])
  np.testing.assert_array_equal(cut(None), [1, 1, 1, 1, 0])


def test_clip_fraction_sees_the_ratio_as_it_was():
  # Bounds wider than ±20, at which `ratio` itself stops.
  logp, advantage = jnp.array([30.0, -30.0]), jnp.array([1.0, -1.0])
  got = losses.clip_fraction(
    logp, jnp.zeros(2), advantage, 1 - np.exp(-25.0), np.exp(25.0)
  )
  np.testing.assert_array_equal(got, [1.0, 1.0])


@pytest.mark.parametrize('clip', [0.1, 0.5])
def test_value_clip_is_the_worse_of_two_errors(clip):
  value, old, returns, _ = loss_cases.batch(9)

  @np.vectorize
  def oracle(v, o, r):
    near = min(max(v, o - clip), o + clip)
    return max((v - r) ** 2, (near - r) ** 2) / 2

  loss_cases.agrees(
    lambda x: losses.value_clip(x, old, returns, clip),
    lambda x: oracle(x, old, returns),
    value,
  )


def test_huber_by_hand():
  value, target = jnp.array([1.0, -4.0, 2.0]), jnp.array([0.0, 0.0, 2.5])
  got = losses.huber(value, target, 2.0)
  np.testing.assert_allclose(got, [0.5, 6.0, 0.125], **EXACT)
  slopes = jax.grad(lambda v: losses.huber(v, target, 2.0).sum())(value)
  np.testing.assert_allclose(slopes, [1.0, -2.0, -0.5], **EXACT)
