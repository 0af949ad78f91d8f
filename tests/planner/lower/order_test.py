"""Order of nodes that are ready at the same time."""

import numpy as np

from planner.ir import graph, plan
from planner.lower import cut, order
import toys


def names(flow):
  return [(node.name, node.piece[0]) for node in flow.nodes]


def ordered(flow, where, cost, pieces=1):
  places = {
    p: plan.Placement((i,)) for i, p in enumerate(sorted({*where.values()}))
  }
  chosen = plan.Plan(places, where)
  return order.order(cut.cut(flow, pieces), chosen, cost)


def test_a_short_stage_runs_between_the_pieces_of_a_long_one():
  # b is short, on the place of a, and c elsewhere waits for it.
  flow = toys.chain('row', 'row', 'row', carried=False)
  cost = toys.Known({'a': 8, 'b': 1, 'c': 4})
  where = {'a': 'x', 'b': 'x', 'c': 'y'}
  here = [n for n in names(ordered(flow, where, cost, 4)) if n[0] in 'ab']
  assert here == [(s, i) for i in range(4) for s in 'ab']


def test_a_loop_over_time_advances_all_pieces_step_by_step():
  # act and simulate take turns on two places; pieces interleave.
  value = graph.Value('x', (8,), np.dtype('float32'), ('B',))
  act, simulate = toys.Stage('act', 'row'), toys.Stage('simulate', 'row')
  nodes = tuple(
    graph.Node((act, simulate)[t % 2], (t,), (t + 1,), frozenset({t}))
    for t in range(6)
  )
  flow = graph.Flow(nodes, (value,) * 7, (0,), (6,), ())
  cost = toys.Known({'act': 2, 'simulate': 2})
  scheduled = ordered(flow, {'act': 'x', 'simulate': 'y'}, cost, 2)
  acts = [piece for name, piece in names(scheduled) if name == 'act']
  assert acts == [0, 1, 0, 1, 0, 1]


def test_within_a_piece_the_longest_remaining_path_is_first():
  # a feeds b (short) and, by way of c, d: c goes before b.
  value = graph.Value('x', (8,), np.dtype('float32'), ('B',))
  stages = [toys.Stage(name, 'batch') for name in 'abcd']
  reads = [(0,), (1,), (1,), (3,)]
  nodes = tuple(
    graph.Node(stage, read, (i + 1,))
    for i, (stage, read) in enumerate(zip(stages, reads, strict=True))
  )
  flow = graph.Flow(nodes, (value,) * 5, (0,), (2, 4), ())
  scheduled = ordered(
    flow, dict.fromkeys('abcd', 'x'), toys.Known(dict.fromkeys('abcd', 1))
  )
  assert [name for name, _ in names(scheduled)] == ['a', 'c', 'b', 'd']


def test_an_order_respects_every_edge():
  rng = np.random.default_rng(0)
  for _ in range(50):
    flow = toys.chain(*rng.choice(['row', 'sum', 'batch'], 6))
    where = {s: f'p{rng.integers(3)}' for s in 'abcdef'}
    cost = toys.Known(dict(zip('abcdef', rng.random(6), strict=True)))
    scheduled = ordered(flow, where, cost, int(rng.choice([1, 2, 4])))
    there = {*scheduled.inputs, *(start for start, _ in scheduled.carry)}
    for node in scheduled.nodes:
      assert there.issuperset(node.reads)
      there.update(node.writes)
