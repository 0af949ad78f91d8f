"""Plays a plan by a model's costs: cut, put in order, lowered and simulated."""

import collections
from typing import NamedTuple

from planner.costs import cost as cost_lib
from planner.costs import cost_table
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import passes, program
from planner.simulation import simulate as simulate_lib

STEPS = 8  # Simulated; the seconds of a step are those of the second half.


class Played(NamedTuple):
  """A plan and what came of it.

  Attributes:
    plan: that was played.
    flow: of a step, as the plan cuts and orders it.
    programs: of its places.
    cost: what everything was taken to cost.
    ahead: steps that may begin before an earlier one has ended.
    simulation: of some steps.
  """

  plan: plan_lib.Plan
  flow: graph.Flow
  programs: dict[str, tuple[program.Instruction, ...]]
  cost: cost_lib.Cost
  ahead: int
  simulation: simulate_lib.Simulation

  @property
  def busy(self) -> dict[str, float]:
    """Seconds of a step that each place does not wait."""
    return busy(self.simulation)

  @property
  def seconds(self) -> float:
    """From step to step: as simulated, and no less than there is to do.

    A few steps may not show what a place that falls behind costs in the end.
    """
    return max([self.simulation.period, *self.busy.values()])


def busy(simulation: simulate_lib.Simulation) -> dict[str, float]:
  """Seconds of the first step that each place does not wait."""
  spent = collections.Counter()
  for span in simulation.spans:
    if span.step == 0 and span.what != 'wait':
      spent[span.place] += span.end - span.start
  return dict(spent)


def play(
  flow: graph.Flow, model, plan: plan_lib.Plan, ahead: int = 0
) -> Played:
  """Plays a plan.

  Args:
    flow: as recorded.
    model: of costs, as `planner.search.exact.Model`.
    plan: where and how finely stages run.
    ahead: steps that may begin before an earlier one has ended.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  cost = cost_table.Priced(model, plan)
  flow, programs = passes.lower(flow, plan, cost)
  simulation = simulate_lib.simulate(flow, programs, cost, STEPS, ahead)
  return Played(plan, flow, programs, cost, ahead, simulation)


def again(played: Played, cost: cost_lib.Cost) -> Played:
  """The same programs, if things cost something else."""
  simulation = simulate_lib.simulate(
    played.flow, played.programs, cost, STEPS, played.ahead
  )
  return played._replace(cost=cost, simulation=simulation)
