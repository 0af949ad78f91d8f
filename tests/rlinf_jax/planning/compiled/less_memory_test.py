"""Alternatives to a refused plan: one change each, and less memory."""

import dataclasses

import pytest

from planner.ir import plan as plan_lib
from planner.search.plans import space as space_lib
from planner.simulation import evaluate_plan
from rlinf_jax.planning.compiled import less_memory
from tests.planner.search.plans import second_mesh_test as setting

STAGE = 'gradient'
POLICIES = (plan_lib.STORE_ALL, 'nothing_saveable')
PLACE = plan_lib.Placement(setting.DEVICES, (('fsdp', 4),))


def result(costs, bound=0.0):
  space = dataclasses.replace(
    space_lib.default_space(setting.flow(), costs),
    micro_batch=((STAGE, (None, 16, 8)),),
    remat=((STAGE, POLICIES),),
    offload=('apply',),
  )
  _, found = setting.searched(costs)
  return dataclasses.replace(found, space=space, bound=bound)


def alternatives(plan, stage=STAGE, **kwargs):
  costs = setting.slow_memory()
  return less_memory.alternatives(
    setting.flow(), costs, result(costs, **kwargs), plan, stage
  )


def need(plan) -> float:
  return setting.slow_memory().memory(setting.flow(), plan, 'all')[STAGE]


def test_each_has_one_change_by_which_the_stage_needs_less():
  plan = plan_lib.one_place(setting.flow().stages, PLACE)
  found = alternatives(plan)
  assert {need(some) < need(plan) for some, _ in found} == {True}
  changes = [
    {
      field.name: getattr(some, field.name)
      for field in dataclasses.fields(plan)
      if getattr(some, field.name) != getattr(plan, field.name)
    }
    for some, _ in found
  ]
  assert changes == [
    {'offload': ('apply',)},
    {'micro_batch': {STAGE: 16}},
    {'remat': {STAGE: 'nothing_saveable'}},
  ]
  for some, seconds in found:
    simulated = evaluate_plan.evaluate(
      setting.flow(), setting.slow_memory(), some
    )
    assert seconds == pytest.approx(simulated.seconds)
  assert {s for _, s in alternatives(plan, bound=1e6)} == {1e6}


def test_changes_add_up_until_there_is_none_left():
  plan = plan_lib.one_place(setting.flow().stages, PLACE)
  seen, left = [], [plan]
  while left:
    plan = left.pop()
    left += [some for some, _ in alternatives(plan) if some not in seen]
    seen.append(plan)
  least = min(seen, key=need)
  assert least.micro_batch == {STAGE: 8} and least.offload == ('apply',)
  assert least.remat == {STAGE: 'nothing_saveable'} and not alternatives(least)


def test_a_plan_that_is_refused_as_a_whole_has_alternatives_of_memory_alone():
  plan = plan_lib.one_place(setting.flow().stages, PLACE)
  (some, _), *more = alternatives(plan, stage=None)
  assert some.offload == ('apply',) and not more
