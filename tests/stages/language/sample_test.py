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
