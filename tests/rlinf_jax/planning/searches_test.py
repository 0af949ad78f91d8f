"""The searches of a run: with a second mesh, as far as evaluations allow it."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import claims
from planner import cluster as cluster_lib
from planner.costs import measured, roofline
from planner.costs.mesh import allowed_meshes
from planner.counting import count
from planner.explain import sensitivity
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import exact
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan
from rlinf_jax.planning import autoplan, monitor, searches
from rlinf_jax.runtime import local
from sharding import rules
from stages import workflows
from stages.learn import optimizers
import tiny


def cluster(memory_bandwidth=1e7, host_bandwidth=5e9, latency=None, **kwargs):
  """Memory and links so slow that training and decoding want two meshes."""
  device = cluster_lib.Device(
    'toy',
    {'float32': 1e10},
    1e9,
    1e9,
    memory_bandwidth,
    host_bandwidth,
    launch_seconds=1e-6,
    host_latency_seconds=latency,
  )
  link = cluster_lib.Link(1e-6, 1e7)
  return cluster_lib.Cluster(device, 2, 2, link, link, 0.0, **kwargs)


def workflow(dtype='float32'):
  return workflows.grpo(
    tiny.policy(dtype), tiny.even, optimizers.adamw(1e-2), group_size=4
  )


@functools.cache
def step():
  return tiny.trace(workflow(), tiny.problem())


@functools.cache
def evaluation(rows=8):
  return tiny.trace_evaluation(workflow(), tiny.problem(rows))


@functools.cache
def works():
  return count.of_flow(step())


def model(there=None, rows=8):
  return roofline.Roofline(
    step(),
    works(),
    there or cluster(),
    rules.DEFAULT,
    evaluation=evaluation(rows),
  )


def searched(costs, rows=8):
  return autoplan.search(step(), evaluation(rows), 0, costs)


@functools.cache
def chosen_by_default():
  return searched(model())


def without_a_second_mesh(costs):
  space = space_lib.default_space(step(), costs)
  return exact.search(step(), costs, space)


def pairs(costs, pieces):
  """All plans of two devices whose two meshes take turns."""
  others = [stage for stage in step().stages if stage != 'generate']
  meshes = (
    allowed_meshes.Meshes([step()], costs.layout, 2).of(some, 2)
    for some in (tuple(others), ('generate',))
  )
  for mine, its in itertools.product(*meshes):
    yield plan_lib.Plan(
      {
        'all': plan_lib.Placement((0, 1), mine),
        'generation': plan_lib.Placement((0, 1), its),
      },
      dict.fromkeys(others, 'all') | {'generate': 'generation'},
      pieces=pieces,
      shared_devices=('all', 'generation'),
    )


def can_evaluate(plan, rows):
  """Whether a runtime takes the plan, with what is only evaluated anywhere."""
  for home in plan.places:
    where = dict.fromkeys(evaluation(rows).stages, home) | plan.stages
    try:
      local.LocalRuntime(
        dataclasses.replace(plan, stages=where),
        step=step(),
        evaluate=evaluation(rows),
      ).close()
    except ValueError:
      continue
    return True
  return False


@pytest.mark.parametrize('rows, turns', [(8, True), (7, False)])
def test_a_run_has_the_fastest_pair_of_meshes_that_can_evaluate(rows, turns):
  costs = model(rows=rows)
  chosen = searched(costs, rows)
  assert bool(chosen.plan.shared_devices) == turns
  one = without_a_second_mesh(costs)
  seen = {}
  for pieces in (1, 2):
    for plan in pairs(costs, pieces):
      found = evaluate_plan.evaluate(step(), costs, plan).seconds
      if found < one.seconds:
        seen[found] = can_evaluate(plan, rows)
  assert seen and (turns or not any(seen.values()))
  allowed = [seconds for seconds, can in seen.items() if can]
  assert chosen.prediction.step == pytest.approx(min([*allowed, one.seconds]))
  # The runtime takes the plan as it is.
  local.LocalRuntime(
    chosen.plan, step=step(), evaluate=evaluation(rows)
  ).close()
  assert chosen.plan.stages['answer'] == chosen.plan.stages['generate']


# Processors of their own, and shared ones.
@pytest.mark.parametrize('seed', claims.some(range(4), keep=(0, 1)))
def test_no_plan_of_a_run_is_slower_than_without_a_second_mesh(seed):
  rng = np.random.default_rng(seed)
  there = cluster(
    memory_bandwidth=10 ** rng.uniform(6, 8),
    host_bandwidth=10 ** rng.uniform(7, 10),
    shared_cores=2 if seed % 2 else None,
    contention=1.5,
  )
  costs = model(there)
  chosen, one = searched(costs), without_a_second_mesh(costs)
  predicted = evaluate_plan.evaluate(step(), costs, chosen.plan).seconds
  assert chosen.prediction.step == pytest.approx(predicted)
  assert predicted <= one.seconds * (1 + 1e-9)
  if chosen.plan.shared_devices:
    assert predicted < one.seconds and chosen.gap == 0


def test_a_stopped_search_says_what_the_second_mesh_leaves_open():
  costs = model()
  one = without_a_second_mesh(costs)
  search = functools.partial(
    searches._second_mesh, step(), costs, staleness=0,
    deadline=deadline_lib.NEVER,
  )  # fmt: skip
  stopped = dataclasses.replace(one, bound=0.6 * one.seconds, gap=0.4)
  found, ranked = search(stopped, one.ranked)
  assert found.best.shared_devices and ranked[0] == (found.best, found.seconds)
  assert found.gap == pytest.approx(1 - stopped.bound / found.seconds)
  assert 0 < found.gap < 0.4
  # A report asks what the choice would be if moves took another time.
  moved = sensitivity.SWITCHES, 1.1
  assert moved in sensitivity.all_changes(step(), found)
  assert moved not in sensitivity.all_changes(step(), one)
  # A plan that is faster than the bound is faster than all of the space.
  stopped = dataclasses.replace(one, bound=0.9999 * one.seconds, gap=1e-4)
  found, _ = search(stopped, one.ranked)
  assert found.proved


def test_moves_of_devices_that_share_cores_wait_for_each_other():
  node = next(node for node in step().nodes if node.name == 'gradient')
  v = max(node.reads, key=lambda v: step().values[v].bytes)
  place = plan_lib.Placement((0, 1), (('data', 2),))
  size = step().values[v].bytes
  apart = model(cluster(latency=1e-3))
  assert apart.switch(step(), v, place) == pytest.approx(1e-3 + size / 5e9)
  both = model(cluster(latency=1e-3, shared_cores=1))
  assert both.switch(step(), v, place) == pytest.approx(1e-3 + 2 * size / 5e9)
  slower = both.with_measurements(
    measured.Measurements().times({measured.HOST_MOVES: 3.0})
  )
  assert slower.switch(step(), v, place) == pytest.approx(
    3 * both.switch(step(), v, place)
  )


def test_moves_that_take_time_are_not_taken_for_free():
  free = chosen_by_default()
  moves = free.prediction.stages[measured.HOST_MOVES]
  assert free.plan.shared_devices and moves.value > 0
  # A processor copies at half the speed of its memory.
  assert not searched(model(cluster(host_bandwidth=5e6))).plan.shared_devices


def test_values_that_wait_in_the_memory_of_the_same_processor_need_room():
  """Each half has room alone, and both have not."""
  needs = [
    max(model().memory(step(), chosen_by_default().plan, name).values())
    for name in ('all', 'generation')
  ]
  there = cluster()
  device = dataclasses.replace(there.device, memory_bytes=0.9 * sum(needs))
  there = dataclasses.replace(there, device=device)
  assert max(needs) < there.capacity
  assert searched(model(there)).plan.shared_devices
  there = dataclasses.replace(there, shared_cores=2)
  assert not searched(model(there)).plan.shared_devices


def test_moves_that_take_longer_than_predicted_end_a_second_mesh():
  chosen = chosen_by_default()
  watch = monitor.PlanMonitor(
    (step(), evaluation()), 0, chosen, make_runtime=None
  )
  taken = {
    name: spent.value for name, spent in chosen.prediction.stages.items()
  }
  more = 2 * chosen.prediction.step
  taken[measured.HOST_MOVES] += more
  better = None
  for _ in range(monitor.WINDOW + 1):
    better = watch.update(chosen.prediction.step + more, taken) or better
  assert better is watch.chosen and not better.plan.shared_devices
  assert better.prediction.step < 1.1 * chosen.prediction.step
