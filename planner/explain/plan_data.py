"""All that is known of a plan that was found, as plain data for any reader.

What is said to people, in a terminal or on a page, is said from this.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from planner.explain import overview, reason, sensitivity, slack
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import exact
from planner.simulation import evaluate_plan

SHOWN = 5  # Plans, the best included.
DURING = ', during '  # Before the stage, in what a model says of memory.


def plan_data(
  flow: graph.Flow,
  model,
  found: exact.SearchResult,
  *,
  others: Mapping[str, plan_lib.Plan] | None = None,
  ranked: Sequence[tuple[plan_lib.Plan, float]] = (),
  staleness: int = 0,
  seconds: float = 30.0,
) -> dict[str, Any]:
  """Accounts for the fastest plan.

  Args:
    flow: as recorded.
    model: of the costs, a `planner.costs.roofline.Roofline`.
    found: what a search by this model has found.
    others: plans to compare with, by what they are called.
    ranked: plans and their seconds to compare with, fastest first.
    staleness: as in that search.
    seconds: to ask for at most what would change the choice.

  Returns:
    What JSON can hold. Without a plan that fits, only what does not.
  """
  data = {
    'cluster': _cluster(model.cluster),
    'space': json.loads(found.space.to_json()),
    'searched': {
      'simulated': found.simulated,
      'bounded': found.tried,
      'gap': found.gap,
    },
    'ranked': [],
    'infeasible': [
      {'plan': json.loads(plan.to_json()), 'why': words}
      for plan, words in found.infeasible
    ],
  }
  if found.best is None:
    return data
  best = evaluate_plan.evaluate(flow, model, found.best, staleness)
  ranked = list(ranked) or found.ranked
  changes = sensitivity.sensitivity(
    *(flow, model, found, [plan for plan, _ in ranked]),
    staleness=staleness,
    seconds=seconds,
  )
  shown = [
    evaluate_plan.evaluate(flow, model, p, staleness) for p, _ in ranked[:SHOWN]
  ]
  return data | {
    **overview.to_json(best.flow, found.best, best.simulation),
    'seconds': found.seconds,
    'bottleneck': overview.bottleneck(best.flow, best.simulation),
    'timeline': timeline(best),
    'stages': _stages(model, best),
    'places': _places(flow, model, best),
    'ranked': [
      _compared(flow, other, best, seconds)
      for other, (_, seconds) in zip(shown, ranked, strict=False)
    ],
    'beside': [
      {'title': title} | _beside(flow, model, plan, best, staleness)
      for title, plan in (others or {}).items()
    ],
    'sensitivity': [_change(flow, change) for change in changes],
  }


def _cluster(cluster) -> dict[str, Any]:
  return {
    'device': cluster.device.name,
    'devices': cluster.num_devices,
    'memory': cluster.device.memory_bytes,
    'capacity': cluster.capacity,
  }


def timeline(evaluation: evaluate_plan.PlanEvaluation) -> list[dict[str, Any]]:
  """What places do from the end of one step to that of the next.

  With an older state several steps are under way then.
  """
  spans = evaluation.simulation.spans
  half = evaluate_plan.STEPS // 2
  start = max((s.end for s in spans if s.step == half - 1), default=0.0)
  end = start + evaluation.simulation.period
  return [
    {
      'place': span.place,
      'what': span.what,
      'stage': overview.stage_of(evaluation.flow, span),
      'step': span.step - half,
      'start': max(span.start, start) - start,
      'end': min(span.end, end) - start,
    }
    for span in spans
    if span.start < end and span.end > start and span.what != 'wait'
  ]


def _stages(
  model, evaluation: evaluate_plan.PlanEvaluation
) -> list[dict[str, Any]]:
  spent, free = reason.by_stage(evaluation), slack.slack(evaluation)
  tags = {}
  for flow in overview.flows(evaluation.flow):
    for node in flow.nodes:
      if node.name in free and node.name not in tags:
        place = evaluation.plan.places[evaluation.plan.stages[node.name]]
        rows = evaluation.plan.micro_batch.get(node.name)
        tags[node.name] = model.explain(flow, node, place, rows).total.tag
  return [
    {
      'name': name,
      'place': evaluation.plan.stages[name],
      'micro_batch': evaluation.plan.micro_batch.get(name),
      'seconds': spent.get(name, 0.0),
      'slack': free[name],
      'tag': tags.get(name, 'modeled'),
    }
    for name in free
  ]


def _places(
  flow, model, evaluation: evaluate_plan.PlanEvaluation
) -> list[dict[str, Any]]:
  plan, busy, made = evaluation.plan, evaluation.busy, []
  for name, place in plan.places.items():
    memory = model.explain_memory(flow, plan, name)
    made.append(
      {
        'name': name,
        'devices': list(place.devices),
        'axes': [list(axis) for axis in place.axes],
        'stages': [s for s in flow.stages if plan.stages[s] == name],
        'works': busy.get(name, 0.0),
        'memory': {
          'bytes': memory.total.value,
          'tag': memory.total.tag,
          'during': next(iter(memory), '').partition(DURING)[2],
          'parts': [
            {
              'what': what.partition(DURING)[0],
              'bytes': number.value,
              'tag': number.tag,
            }
            for what, number in memory.items()
            if number.value
          ],
        },
      }
    )
  return made


def _compared(flow, evaluation, best, seconds) -> dict[str, Any]:
  return {
    'plan': json.loads(evaluation.plan.to_json()),
    'seconds': seconds,
    'more': seconds / best.seconds - 1 if best.seconds else 0.0,
    'in_a_line': overview.one_line(flow, evaluation.plan),
    'parts': reason.parts(evaluation)._asdict(),
    'reason': reason.reason(evaluation, best)
    if evaluation.plan != best.plan
    else 'the fastest',
  }


def _beside(flow, model, plan, best, staleness) -> dict[str, Any]:
  """How another plan does; if it cannot be had here, why."""
  most = max(d for place in plan.places.values() for d in place.devices)
  if most >= model.cluster.num_devices:
    return {'refused': f'it needs device {most}, which is not there.'}
  try:
    evaluation = evaluate_plan.evaluate(flow, model, plan, staleness)
  except ValueError as error:
    return {'refused': str(error)}
  return _compared(flow, evaluation, best, evaluation.seconds) | {
    'timeline': timeline(evaluation)
  }


def _change(flow, change: sensitivity.Change) -> dict[str, Any]:
  plan = change.plan
  return {
    'cost': change.cost,
    'times': change.times,
    'before': change.before,
    'seconds': change.seconds,
    'gain': change.gain,
    'proved': change.proved,
    'plan': plan and json.loads(plan.to_json()),
    'in_a_line': plan and overview.one_line(flow, plan),
  }
