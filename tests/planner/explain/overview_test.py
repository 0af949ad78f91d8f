import json

import jax.numpy as jnp
import numpy as np
import pytest

from planner.explain import overview, report_text
from planner.ir import flow as flow_lib
from planner.ir import graph, plan
from planner.lower import passes
from planner.simulation import evaluate_plan, simulate
import stages
import toys


def simulated(pieces=1, offload=(), seconds=None, **places):
  flow = toys.chain('row', 'sum', 'batch')
  chosen = plan.Plan(
    {name: plan.Placement((i,)) for i, name in enumerate(places)},
    {stage: name for name, stages in places.items() for stage in stages},
    pieces=pieces,
    offload=offload,
  )
  cost = toys.Known(seconds or {'a': 4, 'b': 4, 'c': 2}, switch=0.5)
  flow, programs = passes.lower(flow, chosen, cost)
  return flow, chosen, simulate.simulate(flow, programs, cost)


def evaluated(flow, where, pieces=1):
  places = dict.fromkeys(where.values())
  chosen = plan.Plan(
    {name: plan.Placement((i,)) for i, name in enumerate(places)},
    where,
    pieces=pieces,
  )
  cost = toys.Known(dict.fromkeys(where, 4), switch=0.5)
  flow, programs = passes.lower(flow, chosen, cost)
  found = simulate.simulate(flow, programs, cost)
  return evaluate_plan.PlanEvaluation(chosen, flow, programs, cost, 0, found)


def test_a_chart_shows_busy_and_waiting_places():
  flow, _, evaluation = simulated(actor='a', learner='bc')
  assert overview.chart(flow, evaluation, width=10).splitlines() == [
    'actor    aaaa······',
    'learner  ····bbbbcc',
    '         0       10 s',
    '         a a  b b',
    '         c c',
    '         · waits',
  ]


def test_a_chart_shows_overlapping_pieces():
  flow, _, evaluation = simulated(pieces=4, actor='a', learner='bc')
  lines = overview.chart(flow, evaluation, width=14).splitlines()
  assert lines[:2] == ['actor    aaaaaaaa······', 'learner  ··bbbbbbbbcccc']


def test_a_chart_of_overlapping_steps_shows_one_period():
  flow = toys.chain('row', 'row', carried=False)
  cost = toys.Known({'a': 4, 'b': 6})
  places = {'x': plan.Placement((0,)), 'y': plan.Placement((1,))}
  chosen = plan.Plan(places, {'a': 'x', 'b': 'y'})
  flow, programs = passes.lower(flow, chosen, cost)
  found = simulate.simulate(flow, programs, cost, staleness=1)
  assert overview.chart(flow, found, width=12).splitlines()[:3] == [
    'x  aaaaaaaa····',
    'y  bbbbbbbbbbbb',
    '   0          6 s',
  ]


def test_a_plan_of_one_line_counts_its_devices():
  flow = toys.chain('row', 'sum', 'batch')
  places = {
    'actor': plan.Placement((0,)),
    'learner': plan.Placement((1, 2), (('data', 2),)),
  }
  chosen = plan.Plan(places, {'a': 'actor', 'b': 'learner', 'c': 'learner'})
  assert overview.one_line(flow, chosen) == (
    '[a] on 1 device, [b c] on 2 devices (data=2)'
  )


@pytest.mark.parametrize(
  ('shares', 'words'),
  [
    ((1.0, 0.0, 0.0), 'are measured'),
    ((0.999, 0.001, 0.0), 'are measured'),
    ((0.7, 0.0, 0.3), '70 % measured, 30 % assumed'),
    ((0.0, 0.0, 0.0), 'are zero'),
  ],
)
def test_only_origins_of_seconds_that_there_are_are_named(shares, words):
  tags = ('measured', 'modeled', 'assumed')
  text = report_text.known(dict(zip(tags, shares, strict=True)))
  start = 'The seconds of its calls'
  assert text == f'{start}{" " if words.startswith("are") else ": "}{words}.'


def test_moves_between_device_and_host_are_shown():
  flow, _, evaluation = simulated(offload=('a',), all='abc')
  assert overview.MOVING in overview.chart(flow, evaluation).splitlines()[0]
  assert overview.busy(flow, evaluation)['all']['restore'] == pytest.approx(0.5)


def test_the_bottleneck_is_named_with_its_longest_stage():
  flow, _, evaluation = simulated(actor='a', learner='bc')
  assert overview.bottleneck(flow, evaluation, 10.0) == (
    'Place learner is busy 60 % of the time, mostly with b (4 s of 10 s). '
    'actor waits 60 %.'
  )
  # The seconds of a step are those that the report opens with.
  assert overview.bottleneck(flow, evaluation, 12.0) == (
    'Place learner is busy 50 % of the time, mostly with b (4 s of 12 s). '
    'actor waits 67 %.'
  )


def test_a_plan_is_described_in_lines():
  flow, chosen, _ = simulated(pieces=2, offload=('a',), actor='a', learner='bc')
  assert overview.places(flow, chosen).splitlines() == [
    'actor: 1 device',
    '  a',
    'learner: 1 device',
    '  b → c',
    'in 2 pieces',
    'in host memory: a',
  ]


def test_transfers_between_places_are_listed_by_size():
  flow = toys.chain('row', 'sum', 'batch')
  evaluation = evaluated(flow, {'a': 'x', 'b': 'y', 'c': 'y'})
  assert overview.moves(evaluation) == {'a → b': 32, 'c → a': 32}
  assert overview.transfers(evaluation) == 'a → b 32 B, c → a 32 B'
  data = overview.to_json(evaluation)
  assert json.loads(json.dumps(data))['busy']['x'] == {'a': 4}


@pytest.mark.parametrize('pieces', [1, 2])
def test_a_transfer_has_the_bytes_that_a_place_holds_and_is_made_once(pieces):
  half = lambda params: params.astype('bfloat16')
  rows = stages.Stage(lambda x: x, 'rows')
  act, score = (
    stages.Stage(
      lambda params, x: x * params.sum(),
      name,
      unbatched=(0,),
      rounds={0: half},
    )
    for name in ('act', 'score')
  )
  learn = stages.Stage(lambda params, x: params + x.sum(), 'learn', 'batch')

  def step(params, x):
    x = rows(x)
    x = score(params, act(params, x))
    return learn(params, x), x

  flow = flow_lib.trace(step, jnp.ones((4, 8)), jnp.ones((2, 3)))
  where = {'rows': 'x', 'learn': 'x', 'act': 'y', 'score': 'y'}
  found = overview.moves(evaluated(flow, where, pieces))
  assert found == {'learn → act': 64, 'rows → act': 24, 'score → learn': 24}


def test_stages_with_one_initial_get_different_letters():
  flow = toys.chain(*['row'] * 3)
  names = iter(('generate', 'gradient', 'gg'))
  for node in flow.nodes:
    node.stage.name = next(names)
  assert overview.letters(flow) == {'generate': 'g', 'gradient': 'r', 'gg': 'a'}


def test_a_carried_value_that_is_only_moved_has_no_reader():
  """A step makes it of itself, so the next step is no end of the search."""
  array = graph.Value('x', (2,), np.dtype('float32'), ('D',))
  move = graph.Node(graph.Plumbing('split', None), (0,), (1,))
  flow = graph.Flow((move,), (array, array), (), (), ((0, 1),))
  assert overview._reader(flow, {0: ('a',)}, 1, 'a') is None
