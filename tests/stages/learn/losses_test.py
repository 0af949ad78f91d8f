import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import metrics
from stages.learn import losses

EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.
# A central difference over ±1e-5 is off by about 1e-11 times a third
# derivative, and by 1e-16 / 1e-5 of rounding.
SLOPE = {'rtol': 1e-7, 'atol': 1e-8}

AGGREGATES = {
  'token_mean': losses.token_mean,
  'sequence_mean_token_mean': losses.sequence_mean_token_mean,
  'sequence_mean_token_sum': losses.sequence_mean_token_sum,
  'constant': losses.constant(10),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


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
  logp, old, advantage, _ = batch(0)
  agrees(
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
  logp, _, advantage, _ = batch(1)
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, logp, advantage, 0.2, 0.2).sum()
  )(logp)
  np.testing.assert_array_equal(gradient, -advantage)


@pytest.mark.parametrize('seed', range(3))
def test_gspo_clips_whole_sentences(seed):
  logp, old, advantage, mask = batch(seed)

  def oracle(x):
    ratio = np.exp(mean_log_ratio(x, old, mask))
    return surrogate(ratio, advantage, 0.1, 0.15)

  agrees(
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
  logp, old, _, mask = batch(seed)
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
  np.testing.assert_allclose(got, slope(oracle, logp), **SLOPE)


def test_cispo_weighs_a_policy_gradient_and_never_stops_it():
  logp, old, advantage, _ = batch(3)
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
  logp, _, advantage, _ = batch(4)
  np.testing.assert_array_equal(
    losses.cispo(logp, logp, advantage, 1.0, 0.2),
    losses.reinforce(logp, advantage),
  )


@pytest.mark.parametrize('low, high', [(0.2, 0.2), (0.1, 0.4)])
def test_clip_fraction_is_where_the_gradient_is_cut(low, high):
  logp, old, advantage, _ = batch(5, rows=32)
  gradient = jax.grad(
    lambda x: losses.ppo_clip(x, old, advantage, low, high).sum()
  )(logp)
  got = losses.clip_fraction(logp, old, advantage, low, high)
  np.testing.assert_array_equal(got, gradient == 0)
  assert 0.1 < got.mean() < 0.9


def test_dual_clip_fraction_is_what_the_dual_clip_cuts_besides():
  logp, old, advantage, _ = batch(6, rows=32)
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
  logp, ref_logp, _, _ = batch(7)
  oracles = {
    losses.kl_k1: lambda delta: delta,
    losses.kl_k2: lambda delta: delta * delta / 2,
    losses.kl_k3: lambda delta: np.exp(-delta) - 1 + delta,
  }
  for estimate, oracle in oracles.items():
    agrees(
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
  old, drawn, _, mask = batch(seed)
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
  old, drawn, _, mask = batch(8)
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


@pytest.mark.parametrize('clip', [0.1, 0.5])
def test_value_clip_is_the_worse_of_two_errors(clip):
  value, old, returns, _ = batch(9)

  @np.vectorize
  def oracle(v, o, r):
    near = min(max(v, o - clip), o + clip)
    return max((v - r) ** 2, (near - r) ** 2) / 2

  agrees(
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


def aggregate_by_hand(name, loss, mask):
  rows, tokens = loss.shape
  sums = [
    sum(loss[b, t] for t in range(tokens) if mask[b, t]) for b in range(rows)
  ]
  counts = [sum(mask[b]) for b in range(rows)]
  if name == 'sequence_mean_token_mean':
    sums = [s / max(c, 1) for s, c in zip(sums, counts, strict=True)]
  denominators = {'token_mean': sum(counts), 'constant': rows * 10}
  return sum(sums), denominators.get(name, rows)


@pytest.mark.parametrize('name', AGGREGATES)
@pytest.mark.parametrize('seed', range(3))
def test_aggregates_are_their_sums(name, seed):
  loss, _, _, mask = batch(seed)
  got = AGGREGATES[name](jnp.asarray(loss), jnp.asarray(mask))
  np.testing.assert_allclose(got, aggregate_by_hand(name, loss, mask), **EXACT)


@pytest.mark.parametrize('name', AGGREGATES)
@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_the_means_of_pieces_merge_to_that_of_the_whole(name, pieces):
  loss, _, _, mask = map(jnp.asarray, batch(10, rows=16))
  aggregate = jax.jit(AGGREGATES[name])
  parts = [
    aggregate(*piece)
    for piece in zip(
      jnp.split(loss, pieces), jnp.split(mask, pieces), strict=True
    )
  ]
  got = functools.reduce(metrics.merge, parts)
  np.testing.assert_allclose(got, aggregate(loss, mask), rtol=1e-9)


@pytest.mark.parametrize('name', AGGREGATES)
def test_padding_and_the_order_of_rows_change_no_mean(name):
  loss, _, _, mask = map(jnp.asarray, batch(11))
  want = AGGREGATES[name](loss, mask)
  wide = lambda x, fill: jnp.pad(x, ((0, 0), (0, 3)), constant_values=fill)
  padded = AGGREGATES[name](wide(loss, 99.0), wide(mask, 0.0))
  np.testing.assert_allclose(padded, want, **EXACT)
  turned = AGGREGATES[name](loss[::-1], mask[::-1])
  np.testing.assert_allclose(turned, want, **EXACT)


def test_aggregates_by_hand():
  loss = jnp.array([[1.0, 2.0, 3.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
  mask = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
  want = {
    'token_mean': (12.0, 4.0),
    'sequence_mean_token_mean': (8.0, 3.0),
    'sequence_mean_token_sum': (12.0, 3.0),
    'constant': (12.0, 30.0),
  }
  assert {name: f(loss, mask) for name, f in AGGREGATES.items()} == want


@pytest.mark.parametrize('name', AGGREGATES)
def test_a_batch_of_padding_is_finite(name):
  mean = AGGREGATES[name](jnp.ones((2, 3)), jnp.zeros((2, 3)))
  assert mean.sum == 0
  assert np.isfinite(mean.value()[''])
