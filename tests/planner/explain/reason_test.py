import pytest

from planner.explain import reason
from planner.ir import plan
from planner.simulation import evaluate_plan
import toys


def evaluation(model, flow, pieces=1, offload=(), **places):
  chosen = plan.Plan(
    {name: plan.Placement((i,)) for i, name in enumerate(places)},
    {stage: name for name, stages in places.items() for stage in stages},
    pieces=pieces,
    offload=offload,
  )
  return evaluate_plan.evaluate(flow, model, chosen)


WORK = {'a': 4.0, 'b': 4.0, 'c': 1.0}


@pytest.mark.parametrize('move', [0.0, 0.5])
@pytest.mark.parametrize('pieces', [1, 2, 4])
def test_work_waits_and_moves_add_up_to_a_step(move, pieces):
  flow, model = toys.line(WORK, move=move)
  result = evaluation(model, flow, pieces, x='a', y='bc')
  parts = reason.parts(result)
  assert sum(parts[1:]) == pytest.approx(result.seconds)
  assert (parts.place, parts.work) == ('y', pytest.approx(5.0))
  # The first piece of a, which nothing overlaps.
  assert parts.waits == pytest.approx(4 / pieces)
  assert (parts.moves > 0) == (move > 0)


def test_a_plan_of_one_place_is_slower_without_overlap():
  flow, model = toys.line(WORK)
  best, other = (
    evaluation(model, flow, 4, x='a', y='bc'),
    evaluation(model, flow, x='abc'),
  )
  assert reason.reason(other, best) == (
    'nothing overlaps: one place works 9 s, the busiest place of the fastest '
    'plan 5 s'
  )
  assert reason.reason(best, best) == 'as fast, to 0.05 %'


def test_a_faster_plan_that_a_stopped_search_missed_says_so():
  flow, model = toys.line(WORK)
  found, missed = (
    evaluation(model, flow, x='abc'),
    evaluation(model, flow, 4, x='a', y='bc'),
  )
  assert missed.seconds < 0.9 * found.seconds
  assert reason.reason(missed, found).startswith('faster: the search ended')


def test_a_plan_that_is_slower_by_waiting_says_so():
  flow, model = toys.line(WORK)
  best, other = (evaluation(model, flow, n, x='a', y='bc') for n in (4, 1))
  assert reason.reason(other, best) == (
    'the busiest place, y, waits 4 s of a step, not 1 s, most of it while a '
    'runs'
  )


def test_a_plan_that_is_slower_by_moves_says_so():
  flow, model = toys.line(WORK, move=2.0)
  best = evaluation(model, flow, x='a', y='bc')
  other = evaluation(model, flow, x='ac', y='b')
  text = reason.reason(other, best)
  assert text.startswith('moves add 4 s, not 2 s: ')


def test_a_plan_that_is_slower_by_a_stage_of_its_busiest_place_says_so():
  flow, model = toys.line(WORK)
  best = evaluation(model, flow, 4, x='a', y='bc')
  other = evaluation(model, flow, 4, x='ab', y='c')
  assert reason.reason(other, best) == (
    'the busiest place, x, works 8 s, not 5 s: it also runs a (4 s), which the '
    'fastest plan runs elsewhere'
  )
