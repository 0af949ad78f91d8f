"""Calls that are alike cost the same, so that one stands for all."""

import dataclasses

import pytest

from planner.costs import roofline
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut
from planner.search import exact
from planner.search.plans import space as space_lib
from sharding import rules
from tests.planner.costs import toy_costs

STEPS = 4
MESHES = [
  (),
  (('data', 2),),
  (('fsdp', 2),),
  (('tensor', 2),),
  (('data', 2), ('tensor', 2)),
]


def robot_flow() -> graph.Flow:
  """Some steps of a policy and a simulator, then two updates."""
  toy = toy_costs.toy_flow()
  act, judge, grad, step = (node.stage for node in toy.nodes)
  values, nodes, see = list(toy.values[:3]), [], 2

  def new(like):
    values.append(toy.values[like])
    return len(values) - 1

  for _ in range(STEPS):
    chosen, verdict = new(3), new(7)
    nodes += [
      graph.Node(act, (0, see), (chosen,), frozenset({see})),
      graph.Node(judge, (chosen,), (verdict,), frozenset({chosen})),
    ]
    see = chosen
  params, moments = 0, 1
  for _ in range(2):
    sums = new(4)
    nodes += [graph.Node(grad, (params, see), (sums,), frozenset({see}))]
    made = new(5), new(6)
    nodes += [graph.Node(step, (params, moments, sums), made)]
    params, moments = made
  carry = ((0, params), (1, moments))
  return graph.Flow(tuple(nodes), tuple(values), (2,), (verdict,), carry)


def model(flow, **kwargs) -> roofline.Roofline:
  cluster = dataclasses.replace(toy_costs.TOYS, num_devices=4, **kwargs)
  return roofline.Roofline(
    flow, toy_costs.WORKS, cluster, rules.DEFAULT, assumed=toy_costs.SURE
  )


def each_for_itself(monkeypatch):
  """No call stands for another from now on."""
  monkeypatch.setattr(graph.Flow, 'alike', lambda flow, node: node)


@pytest.mark.parametrize('pieces', [1, 2, 4])
def test_a_call_costs_as_much_as_the_one_that_it_is_like(pieces):
  flow = cut.cut(robot_flow(), pieces)
  costs, others = model(flow), 0
  for node in flow.nodes:
    first = flow.alike(node)
    assert flow.alike(first) is first
    others += first is not node
    for axes in MESHES:
      one, other = (
        costs.explain(flow, some, toy_costs.spot(*axes))
        for some in (node, first)
      )
      assert one.total.value == pytest.approx(other.total.value, rel=1e-12)
  assert others > STEPS


def test_calls_with_other_values_are_not_alike():
  flow = robot_flow()
  node = flow.nodes[0]
  changes = {
    'fewer rows': {0: dataclasses.replace(flow.values[3], shape=(16, 8))},
    'other letters': {0: dataclasses.replace(flow.values[3], letters=('', ''))},
  }
  for change in changes.values():
    values = (*flow.values, *change.values())
    v = len(flow.values)
    other = dataclasses.replace(node, reads=(0, v), rows=frozenset({v}))
    both = dataclasses.replace(flow, nodes=(node, other), values=values)
    assert both.alike(other) is other
  # Parameters that change are sent again; a value that is read twice is not.
  for reads, carry in [((1, 2), ((0, 0),)), ((0, 0), ())]:
    other = dataclasses.replace(node, reads=reads)
    both = dataclasses.replace(flow, nodes=(node, other), carry=carry)
    assert both.alike(other) is other


@pytest.mark.parametrize('offload', [(), ('step',)])
@pytest.mark.parametrize('axes', MESHES)
def test_memory_is_that_of_all_calls_one_by_one(monkeypatch, axes, offload):
  flow = robot_flow()
  plan = plan_lib.one_place(flow.stages, toy_costs.spot(*axes))
  plan = dataclasses.replace(plan, offload=offload)
  found = model(flow).memory(flow, plan, 'all')
  each_for_itself(monkeypatch)
  alone = model(flow).memory(flow, plan, 'all')
  assert found == pytest.approx(alone, rel=1e-12)


def test_a_search_finds_what_it_would_find_call_by_call(monkeypatch):
  flow = robot_flow()
  device = dataclasses.replace(toy_costs.DEVICE, memory_bytes=4e6)
  space = space_lib.Space(
    4,
    pieces=(1, 2),
    max_places=2,
    micro_batch={'grad': (None, 8)},
    offload=('step',),
  )
  found = exact.search(flow, model(flow, device=device), space)
  each_for_itself(monkeypatch)
  alone = exact.search(flow, model(flow, device=device), space)
  assert found.best and not found.gap
  assert found.best == alone.best
  assert (found.tried, found.simulated) == (alone.tried, alone.simulated)
  seconds, others = ([n for _, n in x.ranked] for x in (found, alone))
  assert seconds == pytest.approx(others, rel=1e-12)
