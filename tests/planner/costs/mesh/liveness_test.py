"""Modeled memory covers what programs of several places and pieces hold."""

import collections

import numpy as np
import pytest

from planner.costs.mesh import memory
from planner.ir import plan as plan_lib
from planner.lower import lifetimes, passes, program
from tests.planner.lower import lowered_flows
import toys


def held(flow, ops, live):
  """The most bytes of values during each stage of a program.

  Args:
    flow: as cut and ordered.
    ops: the program.
    live: values that are there before.
  """

  def size(values):
    return sum(flow.values[v].bytes for v in values)

  most = collections.Counter()
  for op in ops:
    match op:
      case program.Run(i, donate):
        node, reused = flow.nodes[i], []
        kinds = [lifetimes._kind(flow, v) for v in node.writes]
        for v in donate:
          if (kind := lifetimes._kind(flow, v)) in kinds:
            kinds.remove(kind)
            reused.append(v)
        now = size(live.union(node.writes)) - size(reused)
        most[node.name] = max(most[node.name], now)
        live = live.union(node.writes) - set(donate)
      case program.Recv(v, _):
        live = live | {v}
      case program.Drop(v):
        live = live - {v}
  return most


def modeled(flow, chosen, place):
  """The same by the model, with the sums of a piece that a call adds."""
  most = collections.Counter()
  alive = memory.MemoryModel({}, None).alive(flow, chosen, place)
  for i, values in alive.items():
    node = flow.nodes[i]
    if chosen.pieces > 1 and node.stage.grain == 'sum':
      values = [*values, *node.writes]
    size = sum(flow.values[v].bytes for v in values)
    most[node.name] = max(most[node.name], size)
  return most


@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('num_minibatches', [1, 2])
def test_memory_is_enough_in_any_order_of_calls(num_minibatches, seed):
  flow = lowered_flows.grpo(0.1, num_minibatches)
  rng = np.random.default_rng(seed)
  count, pieces = 1 + seed % 3, (1, 4)[seed // 3 % 2]
  chosen = plan_lib.Plan(
    {str(i): plan_lib.Placement((i,)) for i in range(count)},
    {stage: str(rng.integers(count)) for stage in flow.stages},
    pieces=pieces,
  )
  cut, programs = passes.lower(flow, chosen, toys.Random(seed))
  homes = program.homes(flow, chosen)
  for place in {*chosen.stages.values()}:
    starts = {v for v, places in homes.items() if place in places}
    needed = modeled(flow, chosen, place)
    for name, size in held(cut, programs[place], starts).items():
      most = needed.get(name, max(needed.values()))  # Of splits, joins, sums.
      assert size <= most * 1.005 + 64, (place, name)  # And single numbers.


def test_gradients_of_minibatches_are_there_one_after_another():
  # Others may run at any time beside them, such as what measures a rollout.
  flow = lowered_flows.grpo(0.1, 4)
  stages = dict.fromkeys(flow.stages, 'learner') | {'generate': 'actor'}
  places = {
    name: plan_lib.Placement((i,))
    for i, name in enumerate(('actor', 'learner'))
  }
  chosen = plan_lib.Plan(places, stages)
  alive = memory.MemoryModel({}, None).alive(flow, chosen, 'learner')
  gradients = [node for node in flow.nodes if node.name == 'gradient']
  made = {v for node in gradients for v in node.writes}
  size = lambda values: sum(flow.values[v].bytes for v in values)
  most = max(size(made.intersection(values)) for values in alive.values())
  assert len(gradients) == 4 and most == size(gradients[0].writes)
