import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.learn import advantages

# Two orders of summing some tens of float64 numbers.
EXACT = {'rtol': 1e-12, 'atol': 1e-12}

gae = jax.jit(advantages.gae)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def layout(rng, length, discount):
  """A trajectory, and its episodes as (start, end, bootstrap or None)."""
  reward, value = rng.normal(size=(2, length))
  next_value = np.append(value[1:], rng.normal())
  discounts, continues = np.full(length, discount), np.ones(length)
  episodes, start = [], 0
  for t in range(length):
    how = rng.choice(
      ['goes on', 'terminated', 'truncated'], p=[0.7, 0.15, 0.15]
    )
    if how == 'terminated':
      discounts[t] = continues[t] = 0.0
      episodes.append((start, t + 1, None))
      start = t + 1
    if how == 'truncated':
      continues[t], next_value[t] = 0.0, rng.normal()
      episodes.append((start, t + 1, next_value[t]))
      start = t + 1
  if start < length:
    episodes.append((start, length, next_value[-1]))
  return (reward, value, next_value, discounts, continues), episodes


def double_sum(reward, value, episodes, discount, lambda_):
  """Σₖ≥ₜ (γλ)ᵏ⁻ᵗ δₖ, episode by episode, of which it knows nothing else."""
  advantage = np.zeros_like(reward)
  for start, end, bootstrap in episodes:
    later = np.append(value[start + 1 : end], bootstrap or 0.0)
    delta = reward[start:end] + discount * later - value[start:end]
    for t in range(end - start):
      for k in range(t, end - start):
        advantage[start + t] += (discount * lambda_) ** (k - t) * delta[k]
  return advantage


@pytest.mark.parametrize('lambda_', [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize('seed', range(8))
def test_gae_is_the_double_sum_of_each_episode(seed, lambda_):
  steps, episodes = layout(np.random.default_rng(seed), 40, 0.97)
  got = gae(*map(jnp.asarray, steps), lambda_)
  want = double_sum(*steps[:2], episodes, 0.97, lambda_)
  np.testing.assert_allclose(got, want, **EXACT)


def test_gae_of_chunks_discounts_each_by_its_own_length():
  rng = np.random.default_rng(0)
  reward, value, after = rng.normal(size=(3, 12))
  discount = 0.9 ** rng.integers(1, 5, size=12)
  keep = np.where(np.arange(12) == 6, 0.0, 1.0)
  want = np.zeros(12)
  for t in range(12):
    weight = 1.0
    for k in range(t, 12):
      want[t] += weight * (reward[k] + discount[k] * after[k] - value[k])
      weight *= discount[k] * 0.8 * keep[k]
  got = advantages.gae(
    *map(jnp.asarray, (reward, value, after, discount, keep)), 0.8
  )
  np.testing.assert_allclose(got, want, **EXACT)


def test_gae_by_hand():
  # δ = (1 + ½·2 − 1, 2 + ½·4 − 2, 3 + ½·0 − 4) = (1, 2, −1), γλ = ¼.
  got = advantages.gae(
    jnp.array([1.0, 2.0, 3.0]),
    jnp.array([1.0, 2.0, 4.0]),
    jnp.array([2.0, 4.0, 0.0]),
    jnp.full(3, 0.5),
    jnp.ones(3),
    0.5,
  )
  np.testing.assert_array_equal(got, [1.4375, 1.75, -1.0])


def test_gae_with_lambda_one_is_return_minus_value():
  rng = np.random.default_rng(1)
  reward, value = rng.normal(size=(2, 6))
  after, discount = np.append(value[1:], 0.7), np.full(6, 0.9)
  got = advantages.gae(reward, value, after, discount, np.ones(6), 1.0)
  returns = [
    sum(0.9 ** (k - t) * reward[k] for k in range(t, 6)) + 0.9 ** (6 - t) * 0.7
    for t in range(6)
  ]
  np.testing.assert_allclose(got, np.array(returns) - value, **EXACT)


def test_gae_with_lambda_zero_is_one_step():
  (reward, value, after, discount, keep), _ = layout(
    np.random.default_rng(2), 20, 0.9
  )
  got = advantages.gae(reward, value, after, discount, keep, 0.0)
  np.testing.assert_allclose(got, reward + discount * after - value, **EXACT)


@pytest.mark.parametrize('discount_at_end', [0.0, 0.9])
def test_gae_does_not_look_past_an_episode_end(discount_at_end):
  rng = np.random.default_rng(3)
  reward, value, after = rng.normal(size=(3, 10))
  discount, keep = np.full(10, 0.9), np.ones(10)
  discount[4], keep[4] = discount_at_end, 0.0
  before = gae(reward, value, after, discount, keep, 0.95)
  reward[5:], value[5:], after[5:] = rng.normal(size=(3, 5))
  np.testing.assert_array_equal(
    gae(reward, value, after, discount, keep, 0.95)[:5], before[:5]
  )


def test_gae_bootstraps_at_a_truncation_and_not_at_a_termination():
  def last(discount):
    one = jnp.ones(1)
    return advantages.gae(one, 2 * one, 10 * one, discount * one, 0 * one, 1.0)

  assert last(0.5)[0] == 1 + 0.5 * 10 - 2
  assert last(0.0)[0] == 1 - 2


def test_gae_of_a_sentence_does_not_see_its_padding():
  rng = np.random.default_rng(4)
  value = rng.normal(size=5)

  def judge(padding):
    reward = np.append(np.zeros(4), np.append(3.0, np.zeros(padding)))
    values = np.append(value, rng.normal(size=padding))
    real = np.append(np.ones(4), np.zeros(1 + padding))  # Its end terminates.
    return advantages.gae(
      reward,
      values,
      np.append(values[1:], 0.0),
      real,
      real,
      0.95,
    )[:5]

  np.testing.assert_array_equal(judge(7), judge(0))


def test_gae_is_the_same_mapped_and_compiled():
  steps = [layout(np.random.default_rng(s), 16, 0.9)[0] for s in range(3)]
  batch = [jnp.asarray(np.stack(x)) for x in zip(*steps, strict=True)]
  many = jax.jit(jax.vmap(lambda *x: advantages.gae(*x, 0.95)))(*batch)
  one = [advantages.gae(*map(jnp.asarray, x), 0.95) for x in steps]
  np.testing.assert_allclose(many, np.stack(one), **EXACT)  # XLA may fuse.


def test_group_relative_by_hand():
  # Mean ¼; Σ (R − ¼)² = ¾, over 3 is ¼, whose root is ½.
  got = advantages.group_relative(jnp.array([1.0, 0.0, 0.0, 0.0]))
  want = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6)
  np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize('size', [2, 3, 8, 64])
def test_group_relative_is_the_unbiased_standard_score(size):
  reward = np.random.default_rng(size).normal(3.0, 2.0, size)
  mean = sum(reward) / size
  variance = sum((r - mean) ** 2 for r in reward) / (size - 1)
  want = [(r - mean) / (variance**0.5 + 1e-6) for r in reward]
  got = advantages.group_relative(jnp.asarray(reward))
  np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize('size', [2, 3, 8, 16])
def test_equal_rewards_have_no_advantage(size):
  reward = jnp.array([0.0, 0.1, 0.7, -1.7, 1e4 / 3], jnp.float32)
  groups = jnp.repeat(reward[:, None], size, axis=1)
  np.testing.assert_array_equal(
    jax.jit(jax.vmap(advantages.group_relative))(groups), jnp.zeros((5, size))
  )


def test_the_formula_alone_would_give_equal_rewards_an_advantage():
  reward = jnp.full(16, 1e4 / 3, jnp.float32)
  formula = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)
  assert abs(formula).max() > 0.1


def test_almost_equal_rewards_have_a_small_advantage():
  reward = jnp.array([1.0, 1.0 + 1e-7])
  want = np.array([-0.5e-7, 0.5e-7]) / (1e-7 / 2**0.5 + 1e-6)
  got = advantages.group_relative(reward)
  np.testing.assert_allclose(got, want, rtol=1e-7)  # 1 + 1e-7 keeps 9 digits.


@pytest.mark.parametrize(
  'estimate', [advantages.group_relative, advantages.leave_one_out]
)
def test_a_group_of_one_is_refused(estimate):
  with pytest.raises(
    ValueError,
    match=r'a group of 1: make groups of 2 or more \(group_size; GROUP',
  ):
    estimate(jnp.ones(1))


def test_group_centered_by_hand():
  got = advantages.group_centered(jnp.array([1.0, 0.0, 0.0, 1.0, 3.0]))
  np.testing.assert_array_equal(got, [0.0, -1.0, -1.0, 0.0, 2.0])


@pytest.mark.parametrize('size', [2, 5, 16])
def test_leave_one_out_compares_with_the_mean_of_the_others(size):
  reward = np.random.default_rng(size).normal(size=size)
  want = [reward[i] - np.delete(reward, i).mean() for i in range(size)]
  got = advantages.leave_one_out(jnp.asarray(reward))
  np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize(
  'estimate',
  [
    advantages.group_relative,
    advantages.group_centered,
    advantages.leave_one_out,
  ],
)
def test_a_group_sums_to_zero_and_its_order_does_not_matter(estimate):
  reward = jnp.asarray(np.random.default_rng(5).normal(size=8))
  order = np.random.default_rng(6).permutation(8)
  advantage = estimate(reward)
  np.testing.assert_allclose(advantage.sum(), 0.0, **EXACT)
  np.testing.assert_allclose(estimate(reward[order]), advantage[order], **EXACT)
  np.testing.assert_allclose(estimate(reward + 5.0), advantage, **EXACT)


def test_whiten_is_the_biased_standard_score_of_real_tokens():
  rng = np.random.default_rng(7)
  x, mask = (
    rng.normal(2.0, 3.0, (6, 9)),
    rng.integers(0, 2, (6, 9)).astype(float),
  )
  real = x[mask > 0]
  mean = sum(real) / len(real)
  variance = sum((r - mean) ** 2 for r in real) / len(real)
  got = np.asarray(advantages.whiten(jnp.asarray(x), jnp.asarray(mask)))
  np.testing.assert_allclose(
    got[mask > 0], (real - mean) / np.sqrt(variance + 1e-8), **EXACT
  )
  np.testing.assert_array_equal(got[mask == 0], 0.0)


def test_whiten_by_hand():
  got = advantages.whiten(
    jnp.array([[1.0, 3.0], [99.0, 5.0]]), jnp.array([[1.0, 1.0], [0.0, 1.0]])
  )
  want = np.array([[-2.0, 0.0], [0.0, 2.0]]) / np.sqrt(8 / 3 + 1e-8)
  np.testing.assert_allclose(got, want, **EXACT)


def test_whiten_keeps_equal_numbers_finite_at_zero():
  np.testing.assert_array_equal(
    advantages.whiten(jnp.full(4, 2.0), jnp.ones(4)), np.zeros(4)
  )
  np.testing.assert_array_equal(
    advantages.whiten(jnp.full(4, 2.0), jnp.zeros(4)), np.zeros(4)
  )


def test_whitening_pieces_is_another_thing():
  x = jnp.array([0.0, 1.0, 10.0, 11.0])
  whole = advantages.whiten(x, jnp.ones(4))
  pieces = [advantages.whiten(p, jnp.ones(2)) for p in (x[:2], x[2:])]
  assert abs(whole - jnp.concatenate(pieces)).max() > 1.0
