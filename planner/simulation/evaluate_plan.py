"""Evaluates a plan with a cost model: cuts, orders, lowers and simulates it."""

import collections
import math
from typing import NamedTuple

from planner.costs import cost_table
from planner.ir import cost as cost_lib
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import passes, program
from planner.simulation import simulate as simulate_lib

LEAST = 8  # Steps that are simulated at least.


def steps(staleness: int) -> int:
  """Returns how many steps are simulated; the second half gives the seconds.

  Steps that overlap may end in bursts of `staleness + 1` steps, so each half
  has whole bursts.
  """
  burst = staleness + 1
  return 2 * burst * math.ceil(LEAST / 2 / burst)


class PlanEvaluation(NamedTuple):
  """A plan and its simulation.

  Attributes:
    plan: the plan.
    flow: a step, as the plan cuts and orders it.
    programs: the program of each place.
    cost: the costs of the flow under the plan.
    staleness: number of steps that may begin before an earlier one has ended.
    simulation: the simulation of some steps.
  """

  plan: plan_lib.Plan
  flow: graph.Flow
  programs: dict[str, tuple[program.Instruction, ...]]
  cost: cost_lib.Cost
  staleness: int
  simulation: simulate_lib.Simulation

  @property
  def busy(self) -> dict[str, float]:
    """Seconds of a step in which each place does not wait."""
    return busy(self.simulation)

  @property
  def seconds(self) -> float:
    """Seconds from step to step: simulated, and at least the busiest place's.

    A few simulated steps may not show yet that a place falls behind.
    """
    return max([self.simulation.period, *self.busy.values()])


def busy(simulation: simulate_lib.Simulation) -> dict[str, float]:
  """Returns the seconds of the first step in which each place does not wait."""
  spent = collections.Counter()
  for span in simulation.spans:
    if span.step == 0 and span.what != 'wait':
      spent[span.place] += span.end - span.start
  return dict(spent)


def evaluate(
  flow: graph.Flow, model, plan: plan_lib.Plan, staleness: int = 0
) -> PlanEvaluation:
  """Simulates some steps of a flow under a plan.

  Args:
    flow: as recorded.
    model: the cost model, a `cost_model.Model`.
    plan: places the stages and cuts the batch.
    staleness: number of steps that may begin before an earlier one has ended.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  cost = cost_table.CostTable(model, plan)
  flow, programs = passes.lower(flow, plan, cost)
  simulation = simulate_lib.simulate(
    flow, programs, cost, steps(staleness), staleness
  )
  return PlanEvaluation(plan, flow, programs, cost, staleness, simulation)


def re_evaluate(
  evaluation: PlanEvaluation, cost: cost_lib.Cost
) -> PlanEvaluation:
  """Simulates the same programs with other costs."""
  simulation = simulate_lib.simulate(
    evaluation.flow,
    evaluation.programs,
    cost,
    steps(evaluation.staleness),
    evaluation.staleness,
  )
  return evaluation._replace(cost=cost, simulation=simulation)
