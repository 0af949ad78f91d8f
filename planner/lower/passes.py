"""From a flow and a plan to programs: cut what, order when, lower where."""

from planner.costs import cost as cost_lib
from planner.ir import graph
from planner.lower import cut, order, program


def lower(
  flow: graph.Flow, plan, cost=cost_lib.UNIT, resident=None
) -> tuple[graph.Flow, dict[str, tuple[program.Instruction, ...]]]:
  """Returns the flow as the plan cuts and orders it, and every place's program.

  Args:
    flow: as recorded.
    plan: how to run it.
    cost: of its nodes, which decides who goes first where several could.
    resident: as in `program.lower`.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  flow = cut.cut(flow, plan.pieces)
  if len(plan.places) > 1 or any(node.asynchronous for node in flow.nodes):
    flow = order.order(flow, plan, cost)
  return flow, program.lower(flow, plan, resident)
