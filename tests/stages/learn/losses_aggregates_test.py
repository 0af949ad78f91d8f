"""Means over tokens and over sequences, in pieces and with padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages import metrics
from stages.learn import losses
from tests.stages.learn import loss_cases

EXACT = {'rtol': 1e-12, 'atol': 1e-12}  # Another order of some float64 sums.


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
  loss, _, _, mask = loss_cases.batch(seed)
  got = AGGREGATES[name](jnp.asarray(loss), jnp.asarray(mask))
  np.testing.assert_allclose(got, aggregate_by_hand(name, loss, mask), **EXACT)


@pytest.mark.parametrize('name', AGGREGATES)
@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_the_means_of_pieces_merge_to_that_of_the_whole(name, pieces):
  loss, _, _, mask = map(jnp.asarray, loss_cases.batch(10, rows=16))
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
  loss, _, _, mask = map(jnp.asarray, loss_cases.batch(11))
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
