"""Spaces of plans: written as JSON, refused where they hold no plan."""

import json

import pytest

from planner.search import exact
from planner.search import space as space_lib
import toys


def test_a_space_can_be_written_as_json():
  space = space_lib.Space(8, micro_batch={'a': (None, 4)}, offload=('a',))
  data = json.loads(space.to_json())
  assert data['devices'] == 8
  assert data['micro_batch'] == [['a', [None, 4]]]


@pytest.mark.parametrize(
  'kwargs, why',
  [
    ({'devices': 4, 'unit': 8}, 'no place of 8'),
    ({'devices': 4, 'max_places': 0}, '1 to 0 places'),
    ({'devices': 4, 'pieces': ()}, 'no plan'),
  ],
)
def test_a_space_without_plans_is_refused(kwargs, why):
  with pytest.raises(ValueError, match=why):
    space_lib.Space(**kwargs)


def test_unknown_stages_are_refused():
  flow, model = toys.line({'a': 1.0, 'b': 1.0})
  for strange in ({'colocated': (('a', 'z'),)}, {'offload': ('z',)}):
    with pytest.raises(ValueError, match=r"\['z'\].*'a', 'b'"):
      exact.search(flow, model, space_lib.Space(2, **strange))
