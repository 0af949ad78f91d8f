"""A second mesh for generation, against every pair of meshes."""

import dataclasses
import functools
import itertools

import pytest

from planner import cluster as cluster_lib
from planner.costs import roofline
from planner.costs.mesh import allowed_meshes
from planner.counting import count
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import exact
from planner.search.plans import second_mesh
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan
from sharding import rules
from stages import workflows
from stages.language import language_model
from stages.learn import optimizers
import tiny

DEVICES = tuple(range(4))


@functools.cache
def flow():
  # Parameters are most of what there is.
  config = dataclasses.replace(tiny.CONFIG, D=128, F=512)
  policy = language_model.policy(config, response_length=30, stop=(0,))
  workflow = workflows.grpo(
    policy, tiny.even, optimizers.adamw(1e-2), group_size=4
  )
  return tiny.trace(workflow, tiny.problem())


@functools.cache
def works():
  return count.of_flow(flow())


def model(memory_bandwidth, flops=1e10, memory=1e9):
  """Costs of four devices with so many bytes per second of their memory."""
  device = cluster_lib.Device(
    'toy',
    {'float32': flops},
    flops / 10,
    memory,
    memory_bandwidth,
    5e9,
    launch_seconds=1e-6,
  )
  link = cluster_lib.Link(1e-6, 1e8)
  cluster = cluster_lib.Cluster(
    device, len(DEVICES), len(DEVICES), link, link, memory_reserve=0.0
  )
  return roofline.Roofline(flow(), works(), cluster, rules.DEFAULT)


def slow_memory():
  """Training shards its moments; decoding gathers parameters for that."""
  return model(1e8)


def searched(costs):
  space = dataclasses.replace(
    space_lib.default_space(flow(), costs), max_places=1, pieces=(1,)
  )
  return space, exact.search(flow(), costs, space, keep=25)


def test_the_pair_of_meshes_is_the_fastest_of_all_pairs_that_fit():
  costs = slow_memory()
  space, found = searched(costs)
  plan, seconds = second_mesh.fastest(flow(), costs, space, found.ranked)
  assert seconds < found.seconds

  others = [stage for stage in flow().stages if stage != 'generate']
  seen = {}
  for first, second in itertools.product(
    *(
      allowed_meshes.Meshes([flow()], costs.layout, 4).of(tuple(some), 4)
      for some in (others, ['generate'])
    )
  ):
    if first == second:
      continue
    pair = plan_lib.Plan(
      {
        'all': plan_lib.Placement(DEVICES, first),
        'generation': plan_lib.Placement(DEVICES, second),
      },
      dict.fromkeys(others, 'all') | {'generate': 'generation'},
      shared_devices=('all', 'generation'),
    )
    most = [max(costs.memory(flow(), pair, p).values()) for p in pair.places]
    if max(most) <= costs.capacity:
      found = evaluate_plan.evaluate(flow(), costs, pair)
      seen[first, second] = found.seconds
  best = min(seen, key=seen.get)
  assert seconds == pytest.approx(seen[best])
  assert {x.axes for x in plan.places.values()} == {*best}
  assert plan.shared_devices == ('all', 'generation') == tuple(plan.places)
  for place in plan.places:
    memory = costs.memory(flow(), plan, place)
    assert max(memory.values()) <= costs.capacity


def test_both_halves_fit_in_memory():
  costs = model(1e8, memory=1.6e7)
  space, found = searched(costs)
  plan, _ = second_mesh.fastest(flow(), costs, space, found.ranked)
  assert plan.offload  # There is room without them alone.
  for name in plan.places:
    assert max(costs.memory(flow(), plan, name).values()) <= costs.capacity


def test_no_second_mesh_is_taken_that_is_not_faster():
  costs = model(1e10, flops=1e11)
  space, found = searched(costs)
  assert second_mesh.fastest(flow(), costs, space, found.ranked) is None
  costs = slow_memory()
  space, found = searched(costs)
  ranked = [(plan, 1e-9) for plan, _ in found.ranked]
  assert second_mesh.fastest(flow(), costs, space, ranked) is None


def test_nothing_is_tried_after_the_deadline():
  costs = slow_memory()
  space, found = searched(costs)
  over = deadline_lib.Deadline(0.0)
  assert not second_mesh.fastest(
    flow(), costs, space, found.ranked, deadline=over
  )
