"""The passes from a flow and a plan to programs: cut, order and lower."""

import dataclasses

from planner.ir import cost as cost_lib
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut, order, program


def lower(
  flow: graph.Flow, plan, cost=None, resident=None, idle=None
) -> tuple[graph.Flow, dict[str, tuple[program.Instruction, ...]]]:
  """Returns the flow as the plan cuts and orders it, and all programs.

  Args:
    flow: as recorded.
    plan: the plan.
    cost: costs of its nodes, which decide the order of ready nodes. None for
      the plan's own order; if it has none, all costs are equal.
    resident: as in `program.lower`.
    idle: likewise.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  flow = cut.cut(flow, plan.pieces)
  if cost is None and plan.order:
    flow = order.arranged(flow, plan.order)
  elif has_choice(flow, plan):
    flow = order.order(flow, plan, cost or cost_lib.UNIT)
  return flow, program.lower(flow, plan, resident, idle)


def with_order(flow: graph.Flow, plan, cost) -> plan_lib.Plan:
  """Returns the plan with the order in which `lower` has the nodes by a cost.

  Every process that lowers this plan has the same programs, without the costs.

  Args:
    flow: as recorded.
    plan: the plan.
    cost: costs of its nodes.
  """
  cut_flow = cut.cut(flow, plan.pieces)
  known = ()
  if has_choice(cut_flow, plan):
    known = order.numbers(cut_flow, plan, cost)
  return dataclasses.replace(plan, order=known)


def has_choice(flow: graph.Flow, plan) -> bool:
  """Whether the order of nodes matters for the time of a step."""
  return len(plan.places) > 1 or any(node.asynchronous for node in flow.nodes)
