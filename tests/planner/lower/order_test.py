"""Order of nodes that are ready at the same time."""

import dataclasses

import numpy as np
import pytest

from planner.ir import graph, plan
from planner.lower import cut, order, passes
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


TWO = {'p0': plan.Placement((0,)), 'p1': plan.Placement((1,))}


def test_a_plan_with_an_order_is_lowered_as_by_the_costs_that_gave_it():
  rng, changed = np.random.default_rng(1), 0
  for seed in range(20):
    reads = {'a': ['batch'], 'b': 'a', 'c': 'a', 'd': 'b', 'e': 'c', 'f': 'de'}
    calls = [(name, 'row', [*given]) for name, given in reads.items()]
    flow = toys.build(calls, [])
    where = {s: f'p{rng.integers(2)}' for s in 'abcdef'}
    chosen, cost = plan.Plan(TWO, where, pieces=2), toys.Random(seed)
    known = passes.with_order(flow, chosen, cost)
    known = plan.Plan.from_json(known.to_json())  # As another process reads it.
    assert passes.lower(flow, known) == passes.lower(flow, chosen, cost)
    changed += passes.lower(flow, known) != passes.lower(flow, chosen)
    # With costs, the order of the plan is not used.
    other = toys.Random(seed + 100)
    assert passes.lower(flow, known, other) == passes.lower(flow, chosen, other)
  assert changed > 2


def test_the_order_of_another_step_is_refused():
  chosen = plan.Plan(TWO, dict.fromkeys('abc', 'p0'))
  flow = toys.chain('row', 'row', 'row')
  for wrong in (0, 1), (0, 1, 1), (0, 1, (2, (0,))):
    with pytest.raises(ValueError, match='the step has 3 calls, 0 of them loo'):
      passes.lower(flow, dataclasses.replace(chosen, order=wrong))
  with pytest.raises(ValueError, match='has c before a call that it waits for'):
    passes.lower(flow, dataclasses.replace(chosen, order=(0, 2, 1)))
