import numpy as np
import pytest

from planner.lower import cut
from planner.search import exact, lower_bounds, timing
from planner.search.plans import choices as choices_lib
import toys


def bound(flow, spent, where, pieces=1, share=1.0):
  """The bound of a plan that gives each stage its seconds and its place."""
  flow = cut.cut(flow, pieces)
  names = [node.name for node in flow.nodes]
  rows = [[spent.get(name, 0.0) / node.piece[1]]
          for name, node in zip(names, flow.nodes, strict=True)]  # fmt: skip
  at = np.array([[where.get(name, 0)] for name in names])
  (found,) = lower_bounds.LowerBounds(flow).period(np.array(rows), at, share)
  return found


@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_the_bound_of_a_pipeline_is_its_exact_time(pieces):
  flow, _ = toys.line(dict.fromkeys('abc', 0.0))
  spent, where = {'a': 4.0, 'b': 8.0, 'c': 2.0}, {'a': 0, 'b': 1, 'c': 2}
  # The slowest place is never idle between its first piece and its last.
  assert bound(flow, spent, where, pieces) == pytest.approx(
    4 / pieces + 8 + 2 / pieces
  )


def test_work_before_paths_join_counts_in_full():
  flow = toys.build(
    [
      ('a', 'row', ('batch',)),
      ('b', 'batch', ('a',)),
      ('c', 'row', ('batch', 'b')),
      ('d', 'batch', ('c',)),
    ],
    (),
  )
  spent = dict.fromkeys('abcd', 4.0)
  where = {'a': 0, 'b': 0, 'c': 1, 'd': 1}
  assert bound(flow, spent, where, 4) == pytest.approx(16.0)


def test_branches_on_one_place_take_turns():
  flow = toys.build(
    [
      ('a', 'row', ('batch',)),
      ('b', 'row', ('a',)),
      ('c', 'row', ('a',)),
      ('d', 'batch', ('b', 'c')),
    ],
    (),
  )
  spent = {'a': 1.0, 'b': 2.0, 'c': 3.0, 'd': 4.0}
  where = {'a': 0, 'b': 1, 'c': 1, 'd': 0}
  assert bound(flow, spent, where) == pytest.approx(10.0)
  assert bound(flow, spent, where | {'c': 2}) == pytest.approx(8.0)


def test_a_state_computed_from_itself_bounds_the_period():
  # Even where no step waits for another, but for what it reads.
  flow, _ = toys.line(dict.fromkeys('ab', 0.0))
  loop = toys.build(
    [('a', 'row', ('batch', 'state.b')), ('b', 'batch', ('a',))], ('b',)
  )
  spent, where = {'a': 3.0, 'b': 2.0}, {'a': 0, 'b': 1}
  assert bound(flow, spent, where, share=0.0) == pytest.approx(3.0)
  assert bound(loop, spent, where, share=0.0) == pytest.approx(5.0)


def starts(before, names, spent, at):
  """Earliest starts, with the one-machine bound at every node."""
  head, ancestors = np.zeros(len(before)), []
  for i, made in enumerate(before):
    there = set().union(*({j} | ancestors[j] for j in made))
    ancestors.append(there)
    # Seconds from the end of each node before this one to its start.
    left = {}
    for j in sorted(there, reverse=True):
      paths = [left[k] + spent[k] for k in there if j in before[k]]
      left[j] = max(paths + [0.0] * (j in made))
    head[i] = max((head[j] + spent[j] for j in made), default=0.0)
    sets = [[j for j in there if at[j] == place] for place in set(at)]
    calls = [[j for j in there if names[j] == name] for name in set(names)]
    for some in sets + [nodes for nodes in calls if len(nodes) > 1]:
      if some:
        work = min(head[some]) + sum(spent[some]) + min(left[j] for j in some)
        head[i] = max(head[i], work)
  return head


def test_nodes_after_one_that_all_others_are_before_need_no_bound():
  few = 0
  for seed in range(40):
    rng, n = np.random.default_rng(seed), 12
    before = [
      [int(j) for j in np.flatnonzero(rng.random(i) < 0.3)] for i in range(n)
    ]
    after = [[(k, 0) for k in range(n) if j in before[k]] for j in range(n)]
    names, at = list(rng.choice([*'abc'], n)), rng.integers(3, size=n)
    spent = rng.uniform(0, 1, n)
    edges = [[(j, 0) for j in made] for made in before]
    paths = lower_bounds.Paths(edges, after, range(n), names, set())
    few += len(paths.meets) < sum(len(made) > 1 for made in before)
    here = (at == np.arange(3)[:, None])[:, :, None]
    own, absent = np.where(here, spent[:, None], 0), np.where(here, 0, np.inf)
    heads = paths.heads(spent[:, None], own, absent, 0.0, None)
    want = starts(before, names, spent, at)
    np.testing.assert_allclose(heads[:, 0], want, rtol=1e-12)
  assert few > 20


@pytest.mark.parametrize('seed', range(100))
def test_no_plan_is_faster_than_the_bound_of_its_sizes(seed):
  flow, model, space, staleness = toys.random_instance(seed)
  model.capacity = np.inf
  finder = exact.Search(flow, model, space, staleness, keep=1)
  finder.open_sets()
  choices, rng = finder.choices, np.random.default_rng(seed)
  for opened in finder.open.values():
    part = int(rng.integers(len(choices.blocks)))
    sizes = tuple(1 for _ in choices.blocks[part])
    menus = [choices.menu(block, 1) for block in choices.blocks[part]]
    if sum(sizes) > choices.units or not all(menus):
      continue
    any_of = lambda some: some[rng.integers(len(some))]
    axes = tuple(map(any_of, menus))
    rows = tuple(
      tuple(
        (s, any_of(opened.cut.executions[s])) for s in choices.stages(block)
      )
      for block in choices.blocks[part]
    )
    choice = choices_lib.Choice(
      opened.cut.pieces, part, sizes, axes, rows, space.offload
    )
    _, spent = timing.simulate(choices, choice, staleness)
    low = np.zeros((1, space.max_places), int)
    low[0, : len(sizes)] = 1
    parts = np.array([part])
    high = np.minimum(low * choices.units, choices.units)
    for limit in (low, high):
      (least,) = finder.bound(opened, *opened.seconds(parts, low, limit))
      assert least <= spent * (1 + 1e-9)
