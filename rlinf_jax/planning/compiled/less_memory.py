"""Plans like one that the compiler refused, in which a stage needs less memory.

The model took the refused plan to fit. So what it says of bytes counts for the
comparison of plans alone: the compiler decides on each of them again.
"""

from collections.abc import Iterator
import dataclasses

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import result as result_lib
from planner.simulation import evaluate_plan


def alternatives(
  flow: graph.Flow,
  model,
  result: result_lib.SearchResult,
  plan: plan_lib.Plan,
  stage: str | None,
  staleness: int = 0,
) -> list[tuple[plan_lib.Plan, float]]:
  """Returns plans of the searched space with one change, and their seconds.

  The stage takes the next smaller micro-batch, or has another policy of remat,
  or as much as can be is in host memory. If the change is not enough, the
  alternatives to that plan have a second one.

  Args:
    flow: as recorded, without loops.
    model: the cost model.
    result: of the search.
    plan: the refused plan.
    stage: what was refused; None if it was the plan as a whole.
    staleness: of the workflow, in steps.
  """
  found = []
  before = _bytes(flow, model, plan, stage)
  for some in _changed(result.space, plan, stage):
    try:
      if _bytes(flow, model, some, stage) >= before:
        continue
      seconds = evaluate_plan.evaluate(flow, model, some, staleness).seconds
    except ValueError:  # Rows that the mesh cannot divide.
      continue
    # As in a search, a step takes at least as long as is proved.
    found.append((some, max(seconds, result.bound or 0.0)))
  return found


def _changed(space, plan, stage) -> Iterator[plan_lib.Plan]:
  if {*space.offload} > {*plan.offload}:
    yield dataclasses.replace(plan, offload=space.offload)
  rows = plan.micro_batch.get(stage)
  options = [n for n in dict(space.micro_batch).get(stage, ()) if n is not None]
  fewer = [n for n in options if rows is None or n < rows]
  if fewer:
    yield dataclasses.replace(
      plan, micro_batch=plan.micro_batch | {stage: max(fewer)}
    )
  for policy in dict(space.remat).get(stage, ()):
    if policy not in (plan.remat.get(stage), plan_lib.STORE_ALL):
      yield dataclasses.replace(plan, remat=plan.remat | {stage: policy})


def _bytes(flow, model, plan, stage) -> float:
  """The modeled bytes of a device: while the stage runs, or at most."""
  if stage is None:
    return max(
      max(model.memory(flow, plan, place).values()) for place in plan.places
    )
  return model.memory(flow, plan, plan.stages[stage])[stage]
