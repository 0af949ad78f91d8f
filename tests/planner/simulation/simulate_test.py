import pytest

from planner.ir import plan
from planner.lower import passes, program
from planner.simulation import simulate as simulate_lib
from stages.learn import optimizers
import tiny
import toys


def simulate(flow, stages, cost, pieces=1, offload=(), **kwargs):
  places = {
    name: plan.Placement((i,))
    for i, name in enumerate(dict.fromkeys(stages.values()))
  }
  chosen = plan.Plan(places, stages, pieces=pieces, offload=offload)
  flow, programs = passes.lower(flow, chosen, cost)
  return simulate_lib.simulate(flow, programs, cost, **kwargs)


def test_one_place_does_one_thing_after_another():
  made = simulate(
    toys.chain('row', 'row', 'batch'),
    dict.fromkeys('abc', 'x'),
    toys.Known({'a': 1, 'b': 2, 'c': 4}),
  )
  assert made.period == pytest.approx(7)


@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_pieces_overlap_as_the_textbook_says(pieces):
  # Critical path of one piece, and the bottleneck for the rest.
  flow = toys.chain('row', 'sum', 'batch')
  cost = toys.Known({'a': 4, 'b': 4, 'c': 1})
  made = simulate(flow, {'a': 'x', 'b': 'y', 'c': 'y'}, cost, pieces)
  assert made.period == pytest.approx(
    8 / pieces + (pieces - 1) * 4 / pieces + 1
  )


def test_steps_that_carry_nothing_overlap_as_far_as_they_are_begun():
  flow = toys.chain('row', 'row', carried=False)
  cost, where = toys.Known({'a': 1, 'b': 3}), {'a': 'x', 'b': 'y'}
  assert simulate(flow, where, cost).period == pytest.approx(4)
  assert simulate(flow, where, cost, staleness=1).period == pytest.approx(3)


def test_moves_take_their_time_and_do_not_keep_a_place():
  cost = toys.Known({'a': 1, 'b': 1}, transfer=0.5)
  made = simulate(toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost)
  assert made.period == pytest.approx(1 + 0.5 + 1 + 0.5)
  busy = sum(s.end - s.start for s in made.spans if s.what == 'run')
  assert busy == pytest.approx(2 * 8)


def test_a_switch_keeps_its_place():
  cost = toys.Known({'a': 1, 'b': 1}, switch=0.25)
  made = simulate(
    toys.chain('row', 'row'), dict.fromkeys('ab', 'x'), cost, offload=('a',)
  )
  assert made.period == pytest.approx(2.5)


BRANCHES = [
  ('a', 'row', ('batch',)),
  ('b', 'row', ('a',)),
  ('c', 'row', ('a',)),
  ('d', 'batch', ('b', 'c')),
]


def test_calls_side_by_side_slow_each_other_down_for_as_long_as_they_are():
  flow = toys.build(BRANCHES, ())
  where = {'a': 'x', 'b': 'x', 'c': 'y', 'd': 'x'}
  cost = toys.Known({'a': 1, 'b': 5, 'c': 2, 'd': 1}, slowdown=1.5)
  made = simulate(flow, where, cost, steps=1)
  # c takes 3 s of which b has done 2 s; then b is alone.
  ends = {s.node: s.end for s in made.spans if s.what == 'run'}
  assert [ends[i] for i in range(4)] == pytest.approx([1, 7, 4, 8])


def test_who_moves_or_waits_slows_nobody_down():
  flow = toys.chain('row', 'row')
  cost = toys.Known({'a': 1, 'b': 3}, transfer=0.5, slowdown=2.0)
  made = simulate(flow, {'a': 'x', 'b': 'y'}, cost)
  assert made.period == pytest.approx(5)


@pytest.mark.parametrize('pieces', [1, 2, 4])
def test_what_gains_nothing_by_overlap_takes_as_long_as_one_place(pieces):
  # Two that run beside each other take twice as long: a single core.
  flow = toys.chain('row', 'sum', 'batch')
  cost = toys.Known({'a': 4, 'b': 3, 'c': 1}, slowdown=2.0)
  made = simulate(flow, {'a': 'x', 'b': 'y', 'c': 'y'}, cost, pieces)
  assert made.period == pytest.approx(8)


def test_places_wait_and_say_for_what():
  cost = toys.Known({'a': 1, 'b': 3})
  made = simulate(toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost, steps=4)
  waits = [s for s in made.spans if s.what == 'wait' and s.place == 'x']
  assert [(s.step, s.value) for s in waits] == [(0, 2), (1, 2), (2, 2), (3, 2)]
  assert all(s.end - s.start == pytest.approx(3) for s in waits)


def test_programs_that_wait_for_each_other_are_a_fault():
  flow = toys.chain('row', 'row')
  broken = {
    'x': (program.Recv(1, 'y'), program.Run(0)),
    'y': (program.Recv(0, 'x'), program.Run(1)),
  }
  with pytest.raises(RuntimeError, match='wait for each other'):
    simulate_lib.simulate(flow, broken, toys.Known({}))


def test_a_workflow_of_this_house_can_be_simulated():
  from stages import workflows

  workflow = workflows.grpo(
    tiny.policy(), tiny.even, optimizers.adamw(1e-2), group_size=4
  )
  flow = tiny.trace(workflow, tiny.problem())
  where = dict.fromkeys(flow.stages, 'learner') | {'generate': 'actor'}
  cost = toys.Known({'generate': 4.0, 'gradient': 4.0, 'apply': 1.0})
  periods = [simulate(flow, where, cost, n).period for n in (1, 2, 4)]
  assert periods == pytest.approx([9.0, 7.0, 6.0])


def shared(flow, stages, cost, devices=(0, 0, 0), share='yxz', **kwargs):
  """As `simulate`, of places that share a device."""
  names = dict.fromkeys(stages.values())
  places = {
    name: plan.Placement((i,)) for name, i in zip(names, devices, strict=False)
  }
  share = tuple(name for name in share if name in places)
  chosen = plan.Plan(places, stages, shared_devices=share)
  flow, programs = passes.lower(flow, chosen, cost)
  return simulate_lib.simulate(flow, programs, cost, **kwargs)


def test_places_of_one_device_take_as_long_as_one_place():
  flow, cost = (
    toys.chain('row', 'row', 'batch'),
    toys.Known({'a': 1, 'b': 2, 'c': 4}),
  )
  made = shared(flow, {'a': 'x', 'b': 'y', 'c': 'x'}, cost)
  assert made.period == pytest.approx(7)


def test_what_could_run_side_by_side_does_not_on_one_device():
  flow = toys.build(BRANCHES, ())
  where = {'a': 'x', 'b': 'x', 'c': 'y', 'd': 'x'}
  cost = toys.Known({'a': 1, 'b': 5, 'c': 2, 'd': 1})
  assert simulate(flow, where, cost, steps=1).period == pytest.approx(7)
  assert shared(flow, where, cost, steps=1).period == pytest.approx(9)


def test_a_hand_over_moves_what_is_there_and_what_is_read_next():
  # a and b read and make a value each; both go by way of the host.
  cost = toys.Known({'a': 1, 'b': 2}, switch=0.25)
  made = shared(toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost, steps=4)
  # Each is brought back, and made values are sent there; none is left to move.
  assert made.period == pytest.approx(3 + 2 * 0.25 + 2 * 0.25)
  spent = {
    what: sum(s.end - s.start for s in made.spans if s.what == what)
    for what in ('run', 'restore', 'offload')
  }
  assert spent == pytest.approx({'run': 12, 'restore': 2, 'offload': 0})


def test_of_those_who_wait_the_first_named_is_next():
  # All could begin at once; x has the device first, as it comes first.
  flow = toys.build([(name, 'batch', ('batch',)) for name in 'abc'], ())
  where, cost = (
    dict(zip('abc', 'xyz', strict=True)),
    toys.Known({'a': 1, 'b': 1, 'c': 1}),
  )
  for share in ('xyz', 'xzy'):
    made = shared(flow, where, cost, share=share, steps=1)
    ends = {s.place: s.end for s in made.spans if s.what == 'run'}
    assert sorted(ends, key=ends.get) == list(share)


def test_who_shares_nothing_goes_on_beside_those_who_do():
  flow = toys.build([(name, 'batch', ('batch',)) for name in 'abc'], ())
  where, cost = (
    dict(zip('abc', 'xyz', strict=True)),
    toys.Known({'a': 1, 'b': 1, 'c': 2}),
  )
  made = shared(flow, where, cost, devices=(0, 0, 1), share='xy', steps=1)
  assert made.period == pytest.approx(2)
