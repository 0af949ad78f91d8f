import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.language import sample

SAMPLINGS = [
  sample.Sampling(),
  sample.Sampling(temperature=0.6),
  sample.Sampling(top_k=1),
  sample.Sampling(top_k=5, temperature=1.7),
  sample.Sampling(top_k=100),
  sample.Sampling(top_p=0.5),
  sample.Sampling(top_p=1e-6),
  sample.Sampling(temperature=2.0, top_k=6, top_p=0.8),
]


def logits(seed=0, rows=4, tokens=3, words=17, scale=2.0):
  shape = rows, tokens, words
  return jnp.asarray(
    scale * np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


def softmax(x):
  weight = np.exp(x - x.max())
  return weight / weight.sum()


def kept(logit, sampling):
  """The tokens that may be sampled, by adding up the most likely ones."""
  order = sorted(range(len(logit)), key=lambda v: -logit[v])
  order = order[: sampling.top_k or None]
  share = softmax(np.float64(logit)[order] / sampling.temperature)
  total, among = 0.0, set()
  for v, p in zip(order, share, strict=True):
    if total >= sampling.top_p:
      break
    among.add(v)
    total += p
  return among


@pytest.mark.parametrize('sampling', SAMPLINGS, ids=repr)
def test_shape_keeps_what_adding_up_the_likeliest_keeps(sampling):
  logit_BTV = logits()
  shaped = np.asarray(
    jax.jit(sample.shape, static_argnums=1)(logit_BTV, sampling)
  )
  for row, got in zip(
    np.asarray(logit_BTV).reshape(-1, 17), shaped.reshape(-1, 17), strict=True
  ):
    among = sorted(kept(row, sampling))
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(got)), among)
    np.testing.assert_allclose(
      got[among], row[among] / sampling.temperature, rtol=1e-6
    )


def test_shape_by_hand():
  p = jnp.array([[[0.1, 0.4, 0.2, 0.3]]])

  def drop(**settings):
    shaped = sample.shape(jnp.log(p), sample.Sampling(**settings))
    return np.isfinite(shaped[0, 0]).tolist()

  assert drop(top_k=2) == [False, True, False, True]
  assert drop(top_p=0.69) == [False, True, False, True]
  assert drop(top_p=0.71) == [False, True, True, True]
  # Of the three that top_k leaves, two have 7/9 of the probability.
  assert drop(top_k=3, top_p=0.77) == [False, True, False, True]
  assert drop(top_k=3, top_p=0.78) == [False, True, True, True]


def test_equally_likely_tokens_are_kept_or_dropped_together():
  logit_BTV = jnp.zeros((1, 1, 6)).at[..., 5].set(-1.0)
  for sampling in sample.Sampling(top_k=2), sample.Sampling(top_p=0.3):
    shaped = sample.shape(logit_BTV, sampling)[0, 0]
    assert np.isfinite(shaped).tolist() == [True] * 5 + [False]


def test_drawn_tokens_are_never_dropped():
  logit_BTV, sampling = logits(), sample.Sampling(top_k=2, top_p=0.9)
  worst_BT = logit_BTV.argmin(-1)
  shaped = sample.shape(logit_BTV, sampling, keep_BT=worst_BT)
  free = np.array(sample.shape(logit_BTV, sampling))
  np.put_along_axis(
    free,
    np.asarray(worst_BT)[..., None],
    np.asarray(logit_BTV.min(-1))[..., None],
    -1,
  )
  np.testing.assert_array_equal(shaped, free)
  assert np.isfinite(sample.logp(shaped, worst_BT)).all()
  # Tokens that are kept anyway change nothing.
  best_BT = logit_BTV.argmax(-1)
  np.testing.assert_array_equal(
    sample.shape(logit_BTV, sampling, keep_BT=best_BT),
    sample.shape(logit_BTV, sampling),
  )


@pytest.mark.parametrize('sampling', SAMPLINGS, ids=repr)
def test_logp_and_entropy_are_of_the_distribution_sampled_from(sampling):
  logit_BTV = logits(1)
  shaped = sample.shape(logit_BTV, sampling)
  logp_BT = sample.logp(shaped, logit_BTV.argmax(-1))
  entropy_BT = sample.entropy(shaped)
  for i in np.ndindex(logp_BT.shape):
    row = np.asarray(logit_BTV[i])
    among = sorted(kept(row, sampling))
    share = softmax(np.float64(row)[among] / sampling.temperature)
    want = np.log(share[among.index(row.argmax())])
    np.testing.assert_allclose(logp_BT[i], want, rtol=1e-5, atol=1e-6)
    want = -(share * np.log(share)).sum()
    np.testing.assert_allclose(entropy_BT[i], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('sampling', [SAMPLINGS[1], SAMPLINGS[-1]], ids=repr)
def test_tokens_are_drawn_as_often_as_logp_says(sampling):
  n = 20_000
  shaped = sample.shape(logits(2, 1, 1, 9), sampling)
  key_B = jax.random.split(jax.random.key(0), n)
  token_B = sample.draw(key_B, jnp.repeat(shaped[0], n, axis=0))
  often = np.bincount(token_B, minlength=9) / n
  every = jnp.arange(9)[None]
  p = np.exp(sample.logp(jnp.repeat(shaped, 9, axis=1), every))[0]
  assert (often[p == 0] == 0).all()
  # Five standard deviations of a count.
  assert (np.abs(often - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def test_a_row_is_drawn_by_its_own_key():
  logit_BV = logits(3)[:, 0]
  key_B = jax.random.split(jax.random.key(1), 4)
  order = jnp.array([2, 0, 3, 1])
  np.testing.assert_array_equal(
    sample.draw(key_B, logit_BV)[order],
    sample.draw(key_B[order], logit_BV[order]),
  )


@pytest.mark.parametrize('sampling', SAMPLINGS, ids=repr)
@pytest.mark.parametrize('of', ['logp', 'entropy'])
def test_gradients_are_those_of_the_kept_tokens_alone(sampling, of):
  logit_BTV = logits(4, rows=1, tokens=1)
  best_BT = logit_BTV.argmax(-1)

  def ours(logit_BTV):
    shaped = sample.shape(logit_BTV, sampling)
    if of == 'logp':
      return sample.logp(shaped, best_BT).sum()
    return sample.entropy(shaped).sum()

  among = jnp.array(sorted(kept(np.asarray(logit_BTV[0, 0]), sampling)))

  def plain(logit_BTV):
    logp_V = jax.nn.log_softmax(logit_BTV[0, 0, among] / sampling.temperature)
    return logp_V.max() if of == 'logp' else -(jnp.exp(logp_V) * logp_V).sum()

  got, want = jax.grad(ours)(logit_BTV), jax.grad(plain)(logit_BTV)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_invalid_sampling_settings_are_refused():
  for settings in (
    {'temperature': 0.0},
    {'top_k': -1},
    {'top_p': 0.0},
    {'top_p': 1.1},
  ):
    with pytest.raises(ValueError, match='temperature must be above 0'):
      sample.Sampling(**settings)


shape = jax.jit(sample.shape, static_argnums=1)
# Ties, tokens that are ruled out, sizes that are no power of two.
VOCABULARIES = {
  'normal': lambda rng: rng.normal(size=1009),
  'rounded to bfloat16': lambda rng: np.float32(
    rng.normal(0, 4, 333).astype(jnp.bfloat16)
  ),
  'few values': lambda rng: rng.integers(-2, 3, 333),
  'zeros of both signs': lambda rng: rng.choice([-0.0, 0.0, 1.0, -1.0], 333),
  'half at -inf': lambda rng: np.where(
    rng.random(333) < 0.5, -np.inf, rng.normal(size=333)
  ),
  'one above -inf': lambda rng: np.where(np.arange(333) == 4, 1.5, -np.inf),
  'all equal': lambda rng: np.full(333, -3.25),
  'far apart': lambda rng: rng.normal(size=333) * 10.0 ** rng.integers(-30, 30),
  'one token': lambda rng: np.zeros(1),
}
CUTS = [
  (1, 1.0),
  (7, 1.0),
  (10_000, 0.95),
  (0, 0.3),
  (0, 1e-37),
  (7, 0.8),
  (64, 0.999),
]


def sorted_bounds(logit, k, p):
  """Least logits kept, by sorting, of two probabilities that round to `p`."""
  ranked = np.sort(logit.astype(np.float64))[::-1]
  k = k if 0 < k < len(ranked) else len(ranked)
  weight = np.exp(ranked[:k] - ranked[0])
  before = (np.cumsum(weight) - weight) / weight.sum()
  for limit in p * (1 - 1e-5), p * (1 + 1e-5):
    n = max(1, (before < limit).sum()) if p < 1 else k
    yield ranked[n - 1]


@pytest.mark.parametrize('name', VOCABULARIES)
@pytest.mark.parametrize(('k', 'p'), CUTS)
def test_what_is_kept_is_what_sorting_keeps(name, k, p):
  draw, rng = VOCABULARIES[name], np.random.default_rng(0)
  logit_BTV = np.float32([[draw(rng) for _ in range(3)] for _ in range(2)])
  sampling = sample.Sampling(top_k=k, top_p=p)
  shaped_BTV = np.asarray(shape(jnp.asarray(logit_BTV), sampling))
  for i in np.ndindex(logit_BTV.shape[:2]):
    row, got = logit_BTV[i], shaped_BTV[i]
    most, least = sorted_bounds(row, k, p)
    # The two differ only where the sum is `p` itself, up to rounding.
    assert any(
      np.array_equal(got, np.where(row >= bound, row, -np.inf))
      for bound in (most, least)
    )


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float64'])
def test_logits_of_every_width_are_cut(dtype):
  with jax.enable_x64(dtype == 'float64'):
    logit_BTV = logits(5).astype(dtype)
    got = shape(logit_BTV, sample.Sampling(top_k=5))
    want = [np.sort(np.asarray(row, np.float64))[-5] for row in logit_BTV[:, 0]]
    assert got.dtype == logit_BTV.dtype
    least = np.where(np.isfinite(got), got, np.inf)[:, 0].min(-1)
    np.testing.assert_array_equal(np.float64(least), want)


def test_a_logit_that_is_no_number_is_not_hidden():
  logit_BTV = logits().at[1, 2, 3].set(jnp.nan)
  for settings in {'top_k': 4}, {'top_p': 0.5}, {'top_k': 4, 'top_p': 0.5}:
    got = np.asarray(shape(logit_BTV, sample.Sampling(**settings)))
    assert np.isnan(got[1, 2, 3]) and np.isnan(got).sum() == 1


def test_the_vocabulary_is_not_sorted():
  sampling = sample.Sampling(top_k=50, top_p=0.9)
  logit_BTV = jax.ShapeDtypeStruct((2, 3, 1000), jnp.float32)
  compiled = shape.lower(logit_BTV, sampling).as_text()
  assert 'sort' not in compiled and 'top_k' not in compiled


@pytest.mark.parametrize('is_rounded', [False, True])
def test_what_is_kept_is_what_transformers_keeps(is_rounded):
  torch = pytest.importorskip('torch')
  process = pytest.importorskip('transformers.generation.logits_process')
  logit_BTV = logits(6, rows=16, tokens=1, words=3001, scale=3.0)
  if is_rounded:
    logit_BTV = logit_BTV.astype(jnp.bfloat16).astype(jnp.float32)
  for k, p in (50, 1.0), (0, 0.9), (0, 0.1), (50, 0.9), (3001, 0.99):
    scores = torch.tensor(np.asarray(logit_BTV[:, 0]))
    if k:
      scores = process.TopKLogitsWarper(k)(None, scores)
    if p < 1:
      scores = process.TopPLogitsWarper(p)(None, scores)
    got = np.asarray(shape(logit_BTV, sample.Sampling(top_k=k, top_p=p)))[:, 0]
    want = scores.numpy()
    if not is_rounded or p == 1:
      np.testing.assert_array_equal(got, want)
    elif not k:
      # It drops some of several equal logits, in the order of its sort.
      least = np.where(np.isfinite(want), want, np.inf).min(-1, keepdims=True)
      given = np.asarray(logit_BTV[:, 0])
      np.testing.assert_array_equal(
        got, np.where(given < least, -np.inf, given)
      )


def test_a_sharded_vocabulary_is_not_gathered():
  sampling = sample.Sampling(top_k=50, top_p=0.9)
  logit_BTV = logits(7, rows=4, tokens=2, words=1000)
  mesh = jax.sharding.Mesh(
    np.reshape(jax.devices()[:4], (2, 2)), ('data', 'tensor')
  )
  spec = jax.sharding.PartitionSpec('data', None, 'tensor')
  layout = jax.sharding.NamedSharding(mesh, spec)
  sharded = jax.jit(sample.shape, static_argnums=1, out_shardings=layout)
  placed = jax.device_put(logit_BTV, layout)
  compiled = sharded.lower(placed, sampling).compile().as_text()
  assert 'all-reduce' in compiled
  assert 'all-gather' not in compiled and 'all-to-all' not in compiled
  np.testing.assert_array_equal(
    sharded(placed, sampling), shape(logit_BTV, sampling)
  )


def test_all_64_bits_of_a_seed_count():
  seeds = [0, 5, 2**32 + 5, 2**63 - 1, 2**63 - 2]
  keys = {jax.random.key_data(sample.key(x)).tobytes() for x in seeds}
  assert len(keys) == len(seeds)
