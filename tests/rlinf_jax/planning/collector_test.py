"""The garbage collector is as it was after planning."""

import gc

import pytest

from rlinf_jax.planning import collector

USUAL = 700, 10, 10  # Python's own thresholds; those of tests are higher.


@pytest.fixture
def usual():
  before = gc.get_threshold()
  gc.set_threshold(*USUAL)
  yield
  gc.set_threshold(*before)


def collections() -> list[int]:
  """Number of collections of each generation of objects."""
  return [some['collections'] for some in gc.get_stats()]


def test_only_young_objects_are_collected_meanwhile(usual):
  gc.collect()  # All objects so far are old.
  young, _, old = collections()
  n = max(100_000, len(gc.get_objects()))  # More than a quarter of all objects.
  with collector.only_young():
    kept = [[i] for i in range(n)]
    assert collections()[0] > young
    assert collections()[2] == old
  assert gc.get_threshold() == USUAL
  kept += [[i] for i in range(n)]
  assert collections()[2] > old


def test_an_error_ends_it(usual):
  @collector.only_young()
  def fail():
    raise ValueError

  with pytest.raises(ValueError):
    fail()
  assert gc.get_threshold() == USUAL
