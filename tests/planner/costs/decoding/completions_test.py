"""Completions end when a simulation row by row says."""

import numpy as np
import pytest

from planner.costs.decoding import completions
from planner.costs.decoding import contexts as contexts_lib
from planner.costs.work import NONE

MOST, WINDOW = 9, 4
LATEST = contexts_lib.ColumnReads(NONE, most=MOST)
LONGEST = contexts_lib.ColumnReads(NONE, 'longest')
NEAR = contexts_lib.ColumnReads(NONE, 'longest', window=WINDOW)


def step(batch, contexts):
  """Seconds by the columns that every kind of layers reads."""
  each = contexts.mean + 2 * LATEST.columns(contexts)
  each += 3 * LONGEST.columns(contexts) + 5 * NEAR.columns(contexts)
  return 1.0 + 0.1 * batch + 0.01 * batch * each


def step_by_hand(batch, contexts):
  """The same for one step, given the context of each row."""
  contexts = np.array(contexts)
  each = contexts.mean() + 2 * np.minimum(contexts, MOST).mean()
  last, first = contexts.max(), np.maximum(contexts - WINDOW, 0).min()
  each += 3 * last + 5 * (last - first)
  return 1.0 + 0.1 * batch + 0.01 * batch * each


def by_hand(lengths, slots, prompt=0.0):
  """When each row is complete, a token and a row at a time."""
  written, queue = {}, list(range(len(lengths)))
  done, clock = np.zeros(len(lengths)), 0.0
  while queue or written:
    while queue and len(written) < slots:
      written[queue.pop(0)] = 0
    contexts = [prompt + n for n in written.values()]
    clock += step_by_hand(len(written), contexts)
    for i in list(written):
      written[i] += 1
      if written[i] == lengths[i]:
        done[i] = clock
        del written[i]
  return done


RANDOM = [
  np.random.default_rng(seed).geometric(0.1, 12 + seed) for seed in range(6)
]


@pytest.mark.parametrize('lengths', RANDOM)
def test_rows_end_as_simulated_row_by_row(lengths):
  want = by_hand(lengths, len(lengths), prompt=5)
  got = completions.finish(lengths, step, prompt=5)
  np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize('lengths', RANDOM)
@pytest.mark.parametrize('slots', [1, 3, 8])
def test_slots_are_refilled_as_simulated_row_by_row(lengths, slots):
  want = by_hand(lengths, slots, prompt=5)
  got = completions.refill(lengths, step, slots=slots, prompt=5)
  np.testing.assert_allclose(got, want, rtol=1e-12)
  via = completions.finish(lengths, step, slots=slots, prompt=5)
  np.testing.assert_array_equal(via, got)


@pytest.mark.parametrize('lengths', RANDOM)
def test_refilling_as_many_slots_as_rows_equals_a_single_batch(lengths):
  one = completions.refill(lengths, step, slots=len(lengths), prompt=2)
  np.testing.assert_allclose(one, completions.finish(lengths, step, prompt=2))


def test_a_row_shortens_the_steps_of_the_rows_that_outlive_it():
  done = completions.finish([1, 3], lambda batch, _: batch)
  np.testing.assert_array_equal(done, [2, 4])


@pytest.mark.parametrize('lengths', RANDOM[::2])
def test_groups_are_complete_with_their_last_row(lengths):
  lengths = lengths[:12]
  done = completions.finish(lengths, step)
  want = sorted(max(done[i : i + 3]) for i in range(0, 12, 3))
  np.testing.assert_array_equal(completions.finished_groups(done, 3), want)
  np.testing.assert_array_equal(
    completions.finished_groups(done, 1), np.sort(done)
  )


def flat(batch, contexts):
  """A step that always takes a second."""
  del batch
  return np.ones_like(contexts.steps, float)


def test_refilling_beats_waves_where_lengths_differ():
  """The long tail of one wave is filled by the next."""
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.geometric(0.02, 256), 400)
  waves = sum(
    completions.finish(lengths[i : i + 32], flat).max()
    for i in range(0, 256, 32)
  )
  filled = completions.refill(lengths, flat, slots=32).max()
  least = lengths.sum() / 32
  assert least <= filled < 0.5 * waves


def test_equal_lengths_gain_nothing_from_refilling():
  assert completions.refill([7] * 64, flat, slots=32).max() == 14


def test_empty_slots_read_what_the_longest_row_needs_or_nothing():
  contexts = contexts_lib.Contexts([0, 6], np.array([6, 8]), prompt=5)
  np.testing.assert_array_equal(contexts.longest, [11, 13])
  np.testing.assert_array_equal(contexts.shortest, [5, 7])
  np.testing.assert_array_equal(contexts.mean, [8, 10])
  # Of 11 and 5, then of 13 and 7 columns; one of two slots is empty.
  np.testing.assert_array_equal(contexts.latest(MOST), [7, 8])
  np.testing.assert_array_equal(LATEST.columns(contexts, 0.5), [3.5, 4])
  np.testing.assert_array_equal(LONGEST.columns(contexts, 0.5), [11, 13])
  np.testing.assert_array_equal(NEAR.columns(contexts, 0.5), [10, 10])


@pytest.mark.parametrize(
  'call, words',
  [
    (lambda: completions.finish([], step), 'at least one'),
    (lambda: completions.finish([0, 2], step), 'at least one'),
    (lambda: completions.refill([2], step, slots=0), 'at least 1 slot'),
    (lambda: completions.finished_groups([1, 2, 3], 2), 'no whole number'),
  ],
)
def test_invalid_lengths_slots_and_groups_are_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call()
