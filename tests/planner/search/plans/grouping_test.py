import itertools

import pytest

from planner.search.plans import grouping
import toys


@pytest.mark.parametrize('n', range(1, 7))
@pytest.mark.parametrize('most', range(1, 5))
def test_every_partition_is_listed_once(n, most):
  parts = list(grouping.partitions(n, most))
  assert len(set(map(frozenset, parts))) == len(parts)
  assert all(sum(blocks) == 2**n - 1 for blocks in parts)
  labels = itertools.product(range(n), repeat=n)  # Stages that share a place.
  with_whom = {tuple(map(some.index, some)) for some in labels}
  count = sum(len(set(some)) <= most for some in with_whom)
  assert len(parts) == count


def test_pairs_with_a_common_stage_form_one_group():
  flow = toys.line(dict.fromkeys('abcd', 1.0))[0]
  assert grouping.groups(flow, [('a', 'c'), ('c', 'd')]) == [
    ('a', 'c', 'd'),
    ('b',),
  ]


def test_stages_that_take_no_time_join_a_neighbor():
  work = {'a': 0.0, 'b': 5.0, 'c': 0.0, 'd': 5.0}
  flow, model = toys.line(work)
  together = grouping.merge_small_stages(flow, model, 4)
  assert sorted(s for some in together for s in some) in (
    ['a', 'b', 'c'],
    ['a', 'b', 'c', 'd'],
  )
  assert len(grouping.groups(flow, together)) == 2


def test_stages_that_no_place_can_hold_together_stay_apart():
  work = {'a': 5.0, 'judge': 0.0}
  flow, model = toys.line(work, alone=('judge',))
  assert grouping.merge_small_stages(flow, model, 4) == ()
  assert grouping.merge_small_stages(flow, model, 1) == (('a', 'judge'),)


def test_among_similar_stages_the_shortest_join_first():
  flow, model = toys.line({s: 1.0 + i for i, s in enumerate('abcd')})
  assert grouping.merge_small_stages(flow, model, 4) == ()
  assert grouping.merge_small_stages(flow, model, 4, most=3) == (('a', 'b'),)
  assert grouping.merge_small_stages(flow, model, 4, most=1) == (
    ('a', 'b', 'c', 'd'),
  )
