"""The passes from a flow and a plan to programs: cut, order and lower."""

from planner.costs import cost as cost_lib
from planner.ir import graph
from planner.lower import cut, order, program


def lower(
  flow: graph.Flow, plan, cost=cost_lib.UNIT, resident=None
) -> tuple[graph.Flow, dict[str, tuple[program.Instruction, ...]]]:
  """Returns the flow as the plan cuts and orders it, and all programs.

  Args:
    flow: as recorded.
    plan: the plan.
    cost: costs of its nodes, which decide the order of ready nodes.
    resident: as in `program.lower`.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  flow = cut.cut(flow, plan.pieces)
  if len(plan.places) > 1 or any(node.asynchronous for node in flow.nodes):
    flow = order.order(flow, plan, cost)
  return flow, program.lower(flow, plan, resident)
