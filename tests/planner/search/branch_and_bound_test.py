import numpy as np

from planner.search import branch_and_bound, exact
from planner.search.plans import space as space_lib
import toys


def test_of_sets_with_equal_bounds_the_newest_are_split_first():
  """Each set is marked by the size of its first place."""
  flow, model = toys.line({'a': 4.0, 'b': 4.0})
  search = exact.Search(flow, model, space_lib.Space(2), 0, 1)
  search.open_sets()
  (sets,) = search.open.values()
  some, batch = np.arange(1000), branch_and_bound.BATCH
  sets.part = np.zeros(1000, int)
  sets.low = sets.high = some[:, None] * np.ones(4, int)
  sets.bounds = np.where(some % 2, 1.0, 2.0)
  for taken in (some[1::2][::-1][:batch], some[1::2][::-1][batch:]):
    _, low, _ = sets.take(search)
    assert low[: len(taken), 0].tolist() == taken.tolist()
  assert sets.low[:, 0].tolist() == sorted(sets.low[:, 0])
