"""The model whose completions have a long tail of lengths."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.generation import long_tail
from stages.models import transformer

SMALL = transformer.Config(V=257, D=64, L=2, H=4, K=2, W=16, F=64)


def test_the_95th_percentile_of_lengths_is_eight_times_the_median():
  rng = np.random.default_rng(0)
  means = long_tail.class_means(100)
  length = rng.geometric(1 / means[rng.integers(0, len(means), 200_000)])
  median, p95 = np.quantile(length, [0.5, 0.95])
  np.testing.assert_allclose([median, p95], [100, 800], rtol=0.02)


def test_a_token_ends_its_row_with_the_probability_of_its_class():
  params = long_tail.params(SMALL, 20)
  token = jnp.arange(1, 1 + long_tail.CLASSES)[:, None]
  logit = transformer.Transformer(SMALL).apply(
    {'params': params}, token, jnp.ones_like(token)
  )
  ends = jax.nn.softmax(logit[:, 0])[:, long_tail.STOP]
  classes = long_tail.class_of(np.asarray(token[:, 0]))
  want = 1 / long_tail.class_means(20)[classes]
  np.testing.assert_allclose(ends, want, rtol=0.3)
  # The most likely next token is of the same class.
  follows = np.asarray(logit[:, 0, 1:].argmax(-1)) + 1
  np.testing.assert_array_equal(long_tail.class_of(follows), classes)
