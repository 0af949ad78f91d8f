import pytest

from planner.ir import plan
from planner.lower import passes, program
from planner.simulation import evaluate_plan
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


def test_stages_of_one_place_run_one_after_another():
  result = simulate(
    toys.chain('row', 'row', 'batch'),
    dict.fromkeys('abc', 'x'),
    toys.Known({'a': 1, 'b': 2, 'c': 4}),
  )
  assert result.period == pytest.approx(7)


@pytest.mark.parametrize('pieces', [1, 2, 4, 8])
def test_pieces_overlap_as_in_a_textbook_pipeline(pieces):
  # Critical path of one piece, and the bottleneck for the rest.
  flow = toys.chain('row', 'sum', 'batch')
  cost = toys.Known({'a': 4, 'b': 4, 'c': 1})
  result = simulate(flow, {'a': 'x', 'b': 'y', 'c': 'y'}, cost, pieces)
  assert result.period == pytest.approx(
    8 / pieces + (pieces - 1) * 4 / pieces + 1
  )


def test_independent_steps_overlap_up_to_the_staleness():
  flow = toys.chain('row', 'row', carried=False)
  cost, where = toys.Known({'a': 1, 'b': 3}), {'a': 'x', 'b': 'y'}
  assert simulate(flow, where, cost).period == pytest.approx(4)
  assert simulate(flow, where, cost, staleness=1).period == pytest.approx(3)


def test_transfers_take_time_but_do_not_occupy_a_place():
  cost = toys.Known({'a': 1, 'b': 1}, transfer=0.5)
  result = simulate(toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost)
  assert result.period == pytest.approx(1 + 0.5 + 1 + 0.5)
  busy = sum(s.end - s.start for s in result.spans if s.what == 'run')
  assert busy == pytest.approx(2 * 8)


def test_offloading_occupies_its_place():
  cost = toys.Known({'a': 1, 'b': 1}, switch=0.25)
  result = simulate(
    toys.chain('row', 'row'), dict.fromkeys('ab', 'x'), cost, offload=('a',)
  )
  assert result.period == pytest.approx(2.5)


BRANCHES = [
  ('a', 'row', ('batch',)),
  ('b', 'row', ('a',)),
  ('c', 'row', ('a',)),
  ('d', 'batch', ('b', 'c')),
]


def test_concurrent_calls_slow_each_other_down_while_both_run():
  flow = toys.build(BRANCHES, ())
  where = {'a': 'x', 'b': 'x', 'c': 'y', 'd': 'x'}
  cost = toys.Known({'a': 1, 'b': 5, 'c': 2, 'd': 1}, slowdown=1.5)
  result = simulate(flow, where, cost, steps=1)
  # c takes 3 s of which b has done 2 s; then b is alone.
  ends = {s.node: s.end for s in result.spans if s.what == 'run'}
  assert [ends[i] for i in range(4)] == pytest.approx([1, 7, 4, 8])


def test_transfers_and_waits_do_not_slow_calls_down():
  flow = toys.chain('row', 'row')
  cost = toys.Known({'a': 1, 'b': 3}, transfer=0.5, slowdown=2.0)
  result = simulate(flow, {'a': 'x', 'b': 'y'}, cost)
  assert result.period == pytest.approx(5)


@pytest.mark.parametrize('pieces', [1, 2, 4])
def test_two_places_on_one_core_take_as_long_as_one_place(pieces):
  # Two that run beside each other take twice as long: a single core.
  flow = toys.chain('row', 'sum', 'batch')
  cost = toys.Known({'a': 4, 'b': 3, 'c': 1}, slowdown=2.0)
  result = simulate(flow, {'a': 'x', 'b': 'y', 'c': 'y'}, cost, pieces)
  assert result.period == pytest.approx(8)


def test_spans_of_waiting_name_the_value():
  cost = toys.Known({'a': 1, 'b': 3})
  result = simulate(
    toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost, steps=4
  )
  waits = [s for s in result.spans if s.what == 'wait' and s.place == 'x']
  assert [(s.step, s.value) for s in waits] == [(0, 2), (1, 2), (2, 2), (3, 2)]
  assert all(s.end - s.start == pytest.approx(3) for s in waits)


def test_programs_that_wait_for_each_other_raise_an_error():
  flow = toys.chain('row', 'row')
  broken = {
    'x': (program.Recv(1, 'y'), program.Run(0)),
    'y': (program.Recv(0, 'x'), program.Run(1)),
  }
  with pytest.raises(RuntimeError, match='wait for each other'):
    simulate_lib.simulate(flow, broken, toys.Known({}))


def test_grpo_can_be_simulated():
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


def test_two_places_that_share_a_device_take_as_long_as_one():
  flow, cost = (
    toys.chain('row', 'row', 'batch'),
    toys.Known({'a': 1, 'b': 2, 'c': 4}),
  )
  result = shared(flow, {'a': 'x', 'b': 'y', 'c': 'x'}, cost)
  assert result.period == pytest.approx(7)


def test_branches_do_not_overlap_on_a_shared_device():
  flow = toys.build(BRANCHES, ())
  where = {'a': 'x', 'b': 'x', 'c': 'y', 'd': 'x'}
  cost = toys.Known({'a': 1, 'b': 5, 'c': 2, 'd': 1})
  assert simulate(flow, where, cost, steps=1).period == pytest.approx(7)
  assert shared(flow, where, cost, steps=1).period == pytest.approx(9)


def test_handing_over_a_device_offloads_and_restores_values():
  # a and b read and make a value each; both go by way of the host.
  cost = toys.Known({'a': 1, 'b': 2}, switch=0.25)
  result = shared(toys.chain('row', 'row'), {'a': 'x', 'b': 'y'}, cost, steps=4)
  # Each is brought back, and made values are sent there; none is left to move.
  assert result.period == pytest.approx(3 + 2 * 0.25 + 2 * 0.25)
  spent = {
    what: sum(s.end - s.start for s in result.spans if s.what == what)
    for what in ('run', 'restore', 'offload')
  }
  assert spent == pytest.approx({'run': 12, 'restore': 2, 'offload': 0})


def test_a_shared_device_goes_to_the_first_named_waiting_place():
  # All could begin at once; x has the device first, as it comes first.
  flow = toys.build([(name, 'batch', ('batch',)) for name in 'abc'], ())
  where, cost = (
    dict(zip('abc', 'xyz', strict=True)),
    toys.Known({'a': 1, 'b': 1, 'c': 1}),
  )
  for share in ('xyz', 'xzy'):
    result = shared(flow, where, cost, share=share, steps=1)
    ends = {s.place: s.end for s in result.spans if s.what == 'run'}
    assert sorted(ends, key=ends.get) == list(share)


def test_a_place_with_its_own_device_does_not_wait_for_shared_ones():
  flow = toys.build([(name, 'batch', ('batch',)) for name in 'abc'], ())
  where, cost = (
    dict(zip('abc', 'xyz', strict=True)),
    toys.Known({'a': 1, 'b': 1, 'c': 2}),
  )
  result = shared(flow, where, cost, devices=(0, 0, 1), share='xy', steps=1)
  assert result.period == pytest.approx(2)


@pytest.mark.parametrize('staleness', [1, 2, 3])
def test_steps_that_end_in_bursts_count_as_in_the_long_run(staleness):
  flow, model, *_ = toys.random_instance(410)
  places = {name: plan.Placement((i,)) for i, name in enumerate('xy')}
  chosen = plan.Plan(places, {'a': 'x', 'b': 'y', 'c': 'y'}, pieces=2)
  found = evaluate_plan.evaluate(flow, model, chosen, staleness)
  long = simulate_lib.simulate(
    found.flow, found.programs, found.cost, 48, staleness
  )
  assert found.seconds == pytest.approx(long.period)


@pytest.mark.parametrize('staleness', [1, 2, 3])
def test_the_last_steps_do_not_end_early_as_nothing_follows_them(staleness):
  flow, model, *_ = toys.random_instance(91)
  places = {name: plan.Placement((i,)) for i, name in enumerate('xy')}
  chosen = plan.Plan(places, {'a': 'x', 'b': 'y'}, pieces=2)
  found = evaluate_plan.evaluate(flow, model, chosen, staleness)
  spans = simulate_lib.simulate(
    found.flow, found.programs, found.cost, 48, staleness
  ).spans
  # So many steps before the end that no place has run out of work.
  end = lambda step: max(s.end for s in spans if s.step == step)
  assert found.seconds == pytest.approx((end(35) - end(11)) / 24)
  assert {s.step for s in found.simulation.spans} == set(
    range(evaluate_plan.steps(staleness))
  )


@pytest.mark.parametrize('engine, seconds', [(object(), 9), (None, 5)])
def test_an_engine_keeps_the_devices_that_it_shares(engine, seconds):
  # Beside a host stage that is no engine, such as a tool, others may compute.
  calls = [('a', 'row', ('batch',)), ('b', 'row', ('batch',))]
  calls += [('c', 'row', ('b',)), ('d', 'row', ('a', 'c'))]
  flow = toys.build(calls, ())
  stage = flow.nodes[0].stage
  stage.host = stage.asynchronous = True
  stage.engine = engine
  cost = toys.Known({'a': 4, 'b': 3, 'c': 1, 'd': 1})
  where = {'a': 'x', 'b': 'y', 'c': 'x', 'd': 'x'}
  assert shared(flow, where, cost, share='xy').period == pytest.approx(seconds)
