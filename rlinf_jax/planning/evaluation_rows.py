"""Rows of evaluations that the meshes of a plan cannot divide."""

from planner.costs.mesh import allowed_meshes
from planner.costs.mesh import layout as layout_lib
from planner.ir import graph
from planner.ir import plan as plan_lib


def refusal(
  evaluation: graph.Flow, layout: layout_lib.Layout, plan: plan_lib.Plan
) -> str | None:
  """Says of the first stage that evaluations could not run, and what to do.

  Args:
    evaluation: its flow.
    layout: of values on meshes.
    plan: it need not place the stages that only evaluations have.

  Returns:
    A sentence; None if the plan's meshes divide the rows of all stages.
  """
  for node in evaluation.nodes:
    place = plan.places.get(plan.stages.get(node.name))
    if place is None or not node.rows:
      continue
    if not allowed_meshes.fits(evaluation, layout, (node.name,), place.axes):
      ways = layout.row_ways(place.axes)
      rows = evaluation.rows_of(node) // node.stage.group_size
      return (
        f'Evaluations cannot run by this plan: {node.name} has {rows} groups '
        f'of rows there, which {ways} shards cannot divide. A run searches '
        'among the meshes that can; for this one, let an evaluation batch have '
        f'a multiple of {ways} rows.'
      )
  return None
