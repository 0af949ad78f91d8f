import pytest

from planner.explain import report_text, slack
from planner.ir import plan
from planner.lower import passes
from planner.simulation import evaluate_plan, simulate
import toys


def evaluation(cost, pieces=1, staleness=0, flow=None, **places):
  flow = flow or toys.chain('row', 'sum', 'batch')
  chosen = plan.Plan(
    {name: plan.Placement((i,)) for i, name in enumerate(places)},
    {stage: name for name, stages in places.items() for stage in stages},
    pieces=pieces,
  )
  flow, programs = passes.lower(flow, chosen, cost)
  simulation = simulate.simulate(
    flow, programs, cost, evaluate_plan.steps(staleness), staleness
  )
  return evaluate_plan.PlanEvaluation(
    chosen, flow, programs, cost, staleness, simulation
  )


def test_stages_in_a_chain_have_no_slack():
  result = evaluation(toys.Known({'a': 4, 'b': 4, 'c': 2}), x='a', y='bc')
  assert slack.slack(result) == {'a': 0.0, 'b': 0.0, 'c': 0.0}


def branches(**spent):
  """b and c both follow a, and d both of them."""
  flow = toys.build(
    [
      ('a', 'row', ('batch',)),
      ('b', 'row', ('a',)),
      ('c', 'row', ('a',)),
      ('d', 'batch', ('b', 'c')),
    ],
    (),
  )
  return evaluation(toys.Known(spent), flow=flow, x='abd', y='c')


def test_slack_of_a_short_branch_is_its_distance_to_the_long_one():
  result = branches(a=1, b=5, c=2, d=1)
  assert result.seconds == pytest.approx(7)
  assert slack.slack(result) == pytest.approx({'a': 0, 'b': 0, 'c': 3, 'd': 0})


@pytest.mark.parametrize('pieces', [1, 2, 4])
@pytest.mark.parametrize('b', [1.0, 3.0, 4.0, 7.0])
def test_a_step_takes_longer_only_if_a_stage_exceeds_its_slack(b, pieces):
  cost = toys.Known({'a': 4, 'b': b, 'c': 1}, transfer=0.125)
  result = evaluation(cost, pieces, x='a', y='b', z='c')
  for stage, more in slack.slack(result).items():
    for extra, grows in ((more, False), (more + 1e-3, True)):
      spent = {s: cost.costs[s] + extra * (s == stage) for s in 'abc'}
      longer = evaluate_plan.re_evaluate(
        result, toys.Known(spent, transfer=0.125)
      ).seconds
      assert (longer > result.seconds * (1 + 1e-6)) == grows


def test_with_overlapping_steps_only_the_slowest_stage_has_no_slack():
  flow = toys.chain('row', 'row', carried=False)
  result = evaluation(
    toys.Known({'a': 1, 'b': 3}), flow=flow, staleness=1, x='a', y='b'
  )
  assert result.seconds == pytest.approx(3)
  assert slack.slack(result) == pytest.approx({'a': 2, 'b': 0})


def test_slack_that_is_known_is_told_when_time_is_up():
  def told(**slacks):
    stages = [{'name': name, 'slack': x} for name, x in slacks.items()]
    return report_text.slack({'seconds': 7.0, 'stages': stages})

  assert told(a=0.0, b=0.0) == (
    'No stage has slack: any that takes longer makes the step longer.'
  )
  assert told(a=0.0, c=3.0, d=None) == (
    'Stages without slack: a. Slack, by which a stage could take longer and '
    'the step would not: c 3 s. Time was up before the slack of d was computed.'
  )
  assert told(a=None, b=None) == (
    'Time was up before the slack of all stages was computed.'
  )
