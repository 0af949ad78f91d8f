"""Places and micro-batches of evaluations, by the plan of a step.

A search plans steps. The stages that only evaluations have get a place of that
plan afterwards, and micro-batches with which they fit in its memory.
"""

from collections.abc import Iterator
import dataclasses

from planner import formatting
from planner.costs.mesh import allowed_meshes, memory
from planner.costs.mesh import layout as layout_lib
from planner.counting import count
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import program
from planner.search import deadline as deadline_lib
from planner.search.plans import second_mesh
from planner.search.plans import space as space_lib


def with_evaluation(
  plan: plan_lib.Plan, step: graph.Flow, evaluate: graph.Flow, model
) -> plan_lib.Plan:
  """Places the stages that only evaluations have.

  They go to the place that holds most of what evaluations read, among those
  whose meshes divide their rows; of several such places to one that generates.

  Args:
    plan: of a step.
    step: the flow of a step, without loops.
    evaluate: that of an evaluation, likewise.
    model: the cost model, a `roofline.Roofline`.
  """
  return next(_placed(plan, step, evaluate, model))


def _placed(plan, step, evaluate, model) -> Iterator[plan_lib.Plan]:
  """Yields the plan with these stages at each place, the best place first."""
  rest = [name for name in evaluate.stages if name not in plan.stages]
  homes = program.homes(step, plan)
  fitting = [
    name
    for name, place in plan.places.items()
    if allowed_meshes.fits(evaluate, model.layout, rest, place.axes)
  ]
  bytes_at = dict.fromkeys(fitting or plan.places, 0)
  starts = [start for start, _ in step.carry]
  for i, (start, _) in enumerate(evaluate.carry):
    if start in evaluate.readers:
      for place in bytes_at.keys() & homes[starts[i]]:
        bytes_at[place] += evaluate.values[start].bytes
  generating = {
    place
    for stage, place in plan.stages.items()
    if second_mesh.generates(step, model, stage)
  }
  order = sorted(
    bytes_at,
    key=lambda name: (bytes_at[name], name in generating),
    reverse=True,
  )
  for place in order if rest else order[:1]:
    stages = dict(plan.stages) | dict.fromkeys(rest, place)
    yield dataclasses.replace(plan, stages=stages)


def refusal(
  evaluation: graph.Flow, layout: layout_lib.Layout, plan: plan_lib.Plan
) -> str | None:
  """Says of the first stage that evaluations could not run, and what to do.

  Args:
    evaluation: its flow.
    layout: of values on meshes.
    plan: it need not place the stages that only evaluations have.

  Returns:
    A sentence; None if the plan's meshes and micro-batches divide the rows of
    all stages.
  """
  for node in evaluation.nodes:
    place = plan.places.get(plan.stages.get(node.name))
    if place is None or not node.rows:
      continue
    rows, group = evaluation.rows_of(node), node.stage.group_size
    if not allowed_meshes.fits(evaluation, layout, (node.name,), place.axes):
      ways = layout.row_ways(place.axes)
      return (
        f'Evaluations cannot run by this plan: {node.name} has {rows // group} '
        f'groups of rows there, which {ways} shards cannot divide. A run '
        'searches among the meshes that can; for this one, let an evaluation '
        f'batch have a multiple of {ways} rows.'
      )
    size = plan.micro_batch.get(node.name)
    if size and rows % size:
      return (
        f'Evaluations cannot run by this plan: {node.name} has {rows} rows '
        f'there, and takes {size} at a time. A run searches among the '
        'micro-batches that divide both; for this one, let an evaluation batch '
        f'have a multiple of {size} rows.'
      )
  return None


def fit(
  plan: plan_lib.Plan,
  step: graph.Flow,
  evaluate: graph.Flow,
  model,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
) -> tuple[plan_lib.Plan, str | None]:
  """Places the stages that only evaluations have, so that they fit in memory.

  Each takes as many rows at once as fit, at the first place where all do. No
  number of rows changes what is computed, but for rounding.

  Args:
    plan: as in `with_evaluation`.
    step: likewise.
    evaluate: likewise.
    model: likewise.
    deadline: after which evaluations are placed, and nothing is counted.

  Returns:
    The plan, and a sentence where evaluations cannot run by it, or need too
    much memory, or where it is not known how much they need.
  """
  first = with_evaluation(plan, step, evaluate, model)
  if words := refusal(evaluate, model.layout, plan):
    return first, words
  if deadline.has_passed:
    return first, 'Time was up before the memory of evaluations was known.'
  platform = model.cluster.device.platform
  try:
    more = count.of_flow(evaluate, platform=platform, known=model.works)
  except (NotImplementedError, ValueError) as error:
    why = ' '.join([str(error), *getattr(error, '__notes__', ())])
    return first, f'It is not known how much memory evaluations need: {why}'
  peaks = memory.MemoryModel({**model.works, **more}, model.layout, platform)
  refused = None
  for placed in _placed(plan, step, evaluate, model):
    chosen, words = _fitting(placed, step, evaluate, model, peaks, set(more))
    if words is None:
      return chosen, None
    refused = refused or (chosen, words)
  return refused


def _fitting(plan, step, evaluate, model, peaks, only):
  """Gives the stages `only` the largest micro-batches that fit; see `fit`."""

  def needs(plan, place):
    return peaks.of_evaluation(step, evaluate, plan, place)

  for node in evaluate.nodes:
    if node.name not in only:
      continue
    place = plan.stages[node.name]
    for rows in _micro_batches(evaluate, node, model, plan.places[place].axes):
      if needs(plan, place)[node.name] <= model.capacity:
        break
      sizes = dict(plan.micro_batch) | {node.name: rows}
      plan = dataclasses.replace(plan, micro_batch=sizes)
  for place in plan.places:
    for name, need in needs(plan, place).items():
      if need > model.capacity:
        return plan, (
          f'Evaluations need too much memory, as it is modeled: {name} needs '
          f'{formatting.byte_size(need)} on each device of {place} > '
          f'{formatting.byte_size(model.capacity)} that may be used. Let an '
          'evaluation batch have fewer rows.'
        )
  return plan, None


def _micro_batches(evaluate, node, model, axes) -> list[int]:
  """Returns the micro-batches that a stage may have, the largest first."""
  if node.stage.grain not in ('row', 'sum') or node.stage.host or not node.rows:
    return []
  calls = [other for other in evaluate.nodes if other.name == node.name]
  rows = evaluate.rows_of(node)
  return [
    n
    for n in space_lib.micro_batch_sizes(rows, node.stage, model.cluster)
    if all(not evaluate.rows_of(call) % n for call in calls)
    and allowed_meshes.can_share(model.layout, evaluate, node, axes, n)
  ]
