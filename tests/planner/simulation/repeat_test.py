"""Simulated loops: their seconds, overlap and spans."""

import pytest

from planner.ir import plan as plan_lib
from planner.lower import passes
from planner.simulation import simulate as simulate_lib
from stages import repeat
from tests.planner import loops
from toys import Known

pytestmark = pytest.mark.usefixtures('in_float64')


def simulate(flow, where, cost, pieces=1):
  places = {p: plan_lib.Placement((i,)) for i, p in enumerate('xy')}
  plan = plan_lib.Plan(places, where, pieces=pieces)
  flow, programs = passes.lower(flow, plan, cost)
  return simulate_lib.simulate(flow, programs, cost)


def looped(expect=None):
  loop = repeat.Repeat(loops.counted, 'loop', at_most=5, expect=expect)

  def step(state, inputs):
    x_B, most = inputs
    _, x_B = loop((loops.zero(most), x_B), most)
    return loops.weigh(x_B), ()

  return loops.trace(step)


@pytest.mark.parametrize('expect, rounds', [(None, 5), (2, 2)])
def test_a_loop_takes_as_long_as_its_rounds(expect, rounds):
  cost = Known({'halve': 1, 'weigh': 2, 'grow': 4}, transfer=0.25)
  flow = looped(expect)
  where = dict.fromkeys(flow.stages, 'x')
  assert simulate(flow, where, cost).period == pytest.approx(rounds * 7 + 2)
  # A round waits for the sum, and the next round for the grown rows.
  where |= {'weigh': 'y', 'halve': 'y'}
  period = simulate(flow, where, cost).period
  moved = 0.25 * 2 * rounds  # There and back.
  assert period == pytest.approx(rounds * 7 + 2 + moved, abs=0.51)


def test_the_pieces_of_a_body_overlap():
  cost = Known({'halve': 4, 'weigh': 4})
  flow = looped()
  where = dict.fromkeys(flow.stages, 'x') | {'weigh': 'y'}
  periods = [simulate(flow, where, cost, n).period for n in (1, 2, 4)]
  assert periods == pytest.approx([5 * 8 + 4, 5 * 6 + 4, 5 * 5 + 4])


def test_a_span_within_a_loop_names_the_loop():
  flow = looped()
  simulation = simulate(
    flow, dict.fromkeys(flow.stages, 'x'), Known({'halve': 1})
  )
  (at,) = [i for i, node in enumerate(flow.nodes) if node.body]
  body = flow.nodes[at].body
  spans = [span for span in simulation.spans if span.step == 0 and span.loop]
  assert {span.loop for span in spans} == {(at,)}
  runs = [body.nodes[span.node].name for span in spans if span.what == 'run']
  assert runs == ['halve', 'weigh', 'grow', 'count'] * 5
