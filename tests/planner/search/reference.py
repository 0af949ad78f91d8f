"""A search that tries every plan, for comparison."""

import dataclasses
import itertools
import math

from planner.costs import cost_table
from planner.ir import plan
from planner.lower import passes
from planner.simulation import evaluate_plan
from planner.simulation import simulate as simulate_lib


def play(flow, model, chosen, staleness, **kwargs):
  cost = cost_table.CostTable(model, chosen)
  cut, programs = passes.lower(flow, chosen, cost)
  steps = evaluate_plan.steps(staleness)
  return simulate_lib.simulate(
    cut, programs, cost, **{'steps': steps, 'staleness': staleness} | kwargs
  )


def period(flow, model, chosen, staleness):
  """Seconds of a step in the long run: no place falls behind forever."""
  played = play(flow, model, chosen, staleness)
  busy = [
    sum(s.end - s.start for s in played.spans if (s.place, s.step) == (place, 0)
        and s.what != 'wait')
    for place in chosen.places
  ]  # fmt: skip
  return max(played.period, *busy)


def set_partitions(things):
  if not things:
    yield []
    return
  for rest in set_partitions(things[1:]):
    yield [[things[0]], *rest]
    for i, block in enumerate(rest):
      yield [*rest[:i], [things[0], *block], *rest[i + 1 :]]


def every_plan(flow, model, space):
  """All of a space, in the plainest way; some cannot be followed.

  With every micro-batch and remat, of which `fastest_that_fit` takes some.
  """
  subsets = [
    some
    for r in range(len(space.offload) + 1)
    for some in itertools.combinations(space.offload, r)
  ]
  options = [
    [(stage, rows) for rows in allowed] for stage, allowed in space.micro_batch
  ]
  policies = [
    [(stage, policy) for policy in allowed] for stage, allowed in space.remat
  ]
  for blocks in set_partitions(list(flow.stages)):
    if len(blocks) > space.max_places:
      continue
    blocks = sorted(blocks, key=lambda b: min(map(flow.stages.index, b)))
    if not all(
      any(set(some) <= set(block) for block in blocks)
      for some in space.colocated
    ):
      continue
    units = space.devices // space.unit
    for sizes in itertools.product(range(1, units + 1), repeat=len(blocks)):
      if sum(sizes) > units:
        continue
      sizes = [n * space.unit for n in sizes]
      ordered = [
        tuple(s for s in flow.stages if s in block) for block in blocks
      ]
      menus = [model.axes(b, n) for b, n in zip(ordered, sizes, strict=True)]
      for axes in itertools.product(*menus):
        places, at = {}, 0
        for b in sorted(range(len(sizes)), key=lambda b: -sizes[b]):
          devices = tuple(range(at, at + sizes[b]))
          places[b] = plan.Placement(devices, axes[b])
          at += sizes[b]
        for pieces, offload, rows, remat in itertools.product(
          space.pieces,
          subsets,
          itertools.product(*options),
          itertools.product(*policies),
        ):
          yield plan.Plan(
            {str(b): places[b] for b in range(len(blocks))},
            {s: str(b) for b, block in enumerate(ordered) for s in block},
            micro_batch={s: n for s, n in rows if n is not None},
            pieces=pieces,
            offload=offload,
            remat={s: x for s, x in remat if x != 'none'},
          )


def need(flow, model, chosen):
  """The most bytes that a device of any place needs."""
  return max(
    max(model.memory(flow, chosen, place).values()) for place in chosen.places
  )


def seconds_by_stage(flow, model, chosen):
  """The seconds of the calls of each stage; infinite if one is impossible."""
  seconds = dict.fromkeys(flow.stages, 0.0)
  try:
    cut, _ = passes.lower(flow, chosen, cost_table.CostTable(model, chosen))
  except ValueError:  # Of rows or pieces that there are not.
    return dict.fromkeys(flow.stages, math.inf)
  for node in cut.nodes:
    if node.name in seconds:
      where = chosen.places[chosen.stages[node.name]]
      execution = chosen.execution(node.name)
      seconds[node.name] += model.seconds(cut, node, where, *execution)
  return seconds


def fastest_that_fit(flow, model, plans):
  """Of plans that fit and differ in executions only, the fastest stages'."""
  fit = [some for some in plans if need(flow, model, some) <= model.capacity]
  spent = [seconds_by_stage(flow, model, some) for some in fit]
  for chosen, seconds in zip(fit, spent, strict=True):
    if sum(seconds.values()) < math.inf and all(
      seconds[stage] <= min(other[stage] for other in spent)
      for stage in seconds
    ):
      return chosen
  return None


def brute_force(flow, model, space, staleness):
  """The least seconds of all plans that fit; infinite if none does."""
  best, alike = math.inf, {}
  for chosen in every_plan(flow, model, space):
    key = repr(dataclasses.replace(chosen, micro_batch={}, remat={}))
    alike.setdefault(key, []).append(chosen)
  for plans in alike.values():
    if chosen := fastest_that_fit(flow, model, plans):
      best = min(best, period(flow, model, chosen, staleness))
  return best
