"""Chooses a run's plan from costs that are measured on its machine.

`flow_profile` measures the stages, the fastest plan is searched for with these
costs, and `monitor` compares the plan's prediction with what steps then take.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import typing

from planner import formatting
from planner.costs import cost_table, roofline
from planner.costs import measured as measured_lib
from planner.counting import count
from planner.explain import overview, report_text
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import unroll
from planner.search import deadline as deadline_lib
from planner.simulation import evaluate_plan
from rlinf_jax.planning import evaluation_plan, remedies, searches
from rlinf_jax.planning.profiling import flow_profile
from sharding import rules as rules_lib

# Seconds of search, after which an unproved plan is good enough.
SECONDS = 15.0
PATIENCE = 60.0  # Of a second search where the first found no plan at all.


class NoPlanError(ValueError):
  """No plan was found that fits in memory."""


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The predicted time of a step.

  Attributes:
    step: seconds of a step.
    stages: seconds of each stage, summed over its calls in a step, and whether
      they were measured; with those of moves to and from host memory, as
      `HOST_MOVES`, where there are any.
  """

  step: float
  stages: Mapping[str, measured_lib.Estimate]


@dataclasses.dataclass(frozen=True)
class ChosenPlan:
  """A plan and the reasons for it.

  Attributes:
    plan: places the stages of a step and of an evaluation.
    model: the cost model that predicts the plan's time.
    prediction: the predicted time of a step.
    gap: by what fraction of the predicted time another plan of the searched
      space might still be faster; None if there was no search.
    notice: a sentence where evaluations may need too much memory.
  """

  plan: plan_lib.Plan
  model: roofline.Roofline
  prediction: Prediction
  gap: float | None
  notice: str | None = None

  @property
  def cost(self) -> cost_table.CostTable:
    """The costs that decide which of several ready stages runs first."""
    return cost_table.CostTable(self.model, self.plan)


def find_plan(
  flows: tuple[graph.Flow, graph.Flow],
  staleness: int,
  measure: Callable[[], flow_profile.Profile],
  keep: plan_lib.Plan | None = None,
  print_line: Callable[[str], None] = print,
) -> ChosenPlan:
  """Measures the stages that matter and searches for the fastest plan.

  Args:
    flows: recordings of a step and of an evaluation.
    staleness: the workflow's staleness, in steps: so many steps may overlap.
    measure: as `flow_profile.measure`, of a step.
    keep: the plan of a resumed run. There is no search until steps deviate from
      its prediction.
    print_line: prints a line of text.
  """
  # The planner unrolls loops; the runtime runs them as loops.
  step, evaluate = map(unroll.unroll, flows)
  print_line('Measuring stages to plan by; earlier measurements are reused.')
  profile = measure()
  works = profile.works or count.of_flow(step)
  model = roofline.Roofline(
    step, works, profile.cluster, rules_lib.DEFAULT, evaluation=evaluate
  )
  if profile.stages is None:
    print_line('Planning by modeled costs: one device cannot hold the state.')
  else:
    model = model.with_measurements(profile.stages)
  if keep:
    prediction = predict_step(step, staleness, model, keep)
    chosen = ChosenPlan(keep, model, prediction, gap=None)
  else:
    chosen = search(step, evaluate, staleness, model)
  print_line(summary(flows[0], chosen))
  return chosen


def search(step, evaluate, staleness, model) -> ChosenPlan:
  """Searches for the fastest plan that evaluations can run by, too.

  Raises:
    NoPlanError: if no plan fits in memory, or none was found in time.
  """

  def evaluates(plan):
    plan = evaluation_plan.with_evaluation(plan, step, evaluate, model)
    return not evaluation_plan.refusal(evaluate, model.layout, plan)

  for seconds in (SECONDS, PATIENCE):
    deadline = deadline_lib.Deadline(seconds)
    result = searches.search(step, model, staleness, deadline, evaluates)
    if result.best or result.proved:
      break
  if result.best is None:
    raise NoPlanError(_refusal(step, evaluate, model, result))
  best, notice = evaluation_plan.fit(result.best, step, evaluate, model)
  prediction = predict_step(step, staleness, model, best)
  return ChosenPlan(best, model, prediction, result.gap, notice)


def _refusal(step, evaluate, model, result) -> str:
  """Says that there is no plan, whether that is proved, and what would help."""
  devices = result.space.devices
  lines = [f'No plan fits in the memory of {devices} devices (proved).']
  if result.proved and not result.infeasible:
    lines = [
      f'No mesh of {devices} devices can divide the rows of every stage into '
      'whole groups (proved).'
    ]
  elif not result.proved:
    lines = [
      f'No plan for {devices} devices was found in {PATIENCE:g} s, and it is '
      'not proved that none fits in memory.'
    ]
  rows = max((evaluate.rows_of(n) for n in evaluate.nodes if n.rows), default=0)
  if rows and rows % devices:
    lines += [
      f'Meshes must divide the {rows} rows of an evaluation batch, too: a '
      f'multiple of {devices} leaves more of them.'
    ]
  for plan, words in result.infeasible[:1]:
    lacks, bindings = remedies.shortage(step, model, plan)
    lines += [f'The nearest: {words}.', lacks[0].upper() + lacks[1:], *bindings]
  return ' '.join(
    [
      *lines,
      'Use more devices or a smaller batch, or bind a plan of your own.',
    ]
  )


def predict_step(
  flow: graph.Flow, staleness: int, model, plan: plan_lib.Plan
) -> Prediction:
  """Simulates a plan and returns the predicted time of its steps."""
  evaluation = evaluate_plan.evaluate(flow, model, plan, staleness)
  seconds_by_stage = collections.Counter()
  by_place = overview.busy(evaluation.flow, evaluation.simulation)
  for stages in by_place.values():
    seconds_by_stage.update(stages)
  moved = seconds_by_stage['offload'] + seconds_by_stage['restore']
  seconds_by_stage[measured_lib.HOST_MOVES] = moved
  tags = {measured_lib.HOST_MOVES: 'modeled'} if moved else {}
  for node in evaluation.flow.nodes:
    if not graph.is_plumbing(node):
      place = plan.places[plan.stages[node.name]]
      execution = plan.execution(node.name)
      found = model.explain(evaluation.flow, node, place, *execution)
      tags[node.name] = found.total.tag
  return Prediction(
    evaluation.seconds,
    {
      name: measured_lib.Estimate(seconds_by_stage[name], tag)
      for name, tag in tags.items()
    },
  )


def summary(step: graph.Flow, chosen: ChosenPlan) -> str:
  """Describes a plan in one line, and how its seconds are known."""
  seconds = chosen.prediction.step
  turns = bool(chosen.plan.shared_devices)
  proof = 'proved the fastest of its space'
  if chosen.gap is None:
    proof = 'as the run began'
  elif chosen.gap == 1:
    proof = 'of which nothing is proved: the search was stopped'
  elif chosen.gap:
    space = 'with one mesh on each device' if turns else 'of its space'
    most = report_text.at_most(chosen.gap)
    proof = f'no plan {space} can be more than {most} faster'
  elif turns:
    proof = 'no plan with one mesh on each device is faster (proved)'
  line = overview.one_line(step, chosen.plan)
  shares = dict.fromkeys(typing.get_args(measured_lib.Tag), 0.0)
  calls = [
    spent
    for name, spent in chosen.prediction.stages.items()
    if name != measured_lib.HOST_MOVES
  ]
  total = sum(spent.value for spent in calls)
  for spent in calls:
    shares[spent.tag] += spent.value / total if total else 0.0
  known = report_text.known(shares)
  return ' '.join(
    [
      f'Plan: {line}; {formatting.digits(seconds)} s a step, {proof}. {known}',
      *filter(None, [chosen.notice]),
    ]
  )
