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


def account(
  flow: graph.Flow,
  model,
  found: exact.Found,
  *,
  others: Mapping[str, plan_lib.Plan] | None = None,
  ranked: Sequence[tuple[plan_lib.Plan, float]] = (),
  ahead: int = 0,
  seconds: float = 30.0,
) -> dict[str, Any]:
  """Accounts for the fastest plan.

  Args:
    flow: as recorded.
    model: of the costs, a `planner.costs.roofline.Roofline`.
    found: what a search by this model has found.
    others: plans to compare with, by what they are called.
    ranked: plans and their seconds to compare with, fastest first.
    ahead: as in that search.
    seconds: to ask for at most what would change the choice.

  Returns:
    What JSON can hold. Without a plan that fits, only what does not.
  """
  twin = {
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
    return twin
  best = evaluate_plan.play(flow, model, found.best, ahead)
  ranked = list(ranked) or found.ranked
  changes = sensitivity.sensitivity(
    *(flow, model, found, [plan for plan, _ in ranked]),
    ahead=ahead,
    seconds=seconds,
  )
  shown = [evaluate_plan.play(flow, model, p, ahead) for p, _ in ranked[:SHOWN]]
  return twin | {
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
      {'title': title} | _beside(flow, model, plan, best, ahead)
      for title, plan in (others or {}).items()
    ],
    'sensitivity': [_change(flow, change) for change in changes],
  }


def _cluster(cluster) -> dict[str, Any]:
  return {
    'device': cluster.device.name,
    'devices': cluster.devices,
    'memory': cluster.device.memory,
    'capacity': cluster.capacity,
  }


def timeline(played: evaluate_plan.Played) -> list[dict[str, Any]]:
  """What places do from the end of one step to that of the next.

  With an older state several steps are under way then.
  """
  spans = played.simulation.spans
  half = evaluate_plan.STEPS // 2
  start = max((s.end for s in spans if s.step == half - 1), default=0.0)
  end = start + played.simulation.period
  return [
    {
      'place': span.place,
      'what': span.what,
      'stage': overview.stage_of(played.flow, span),
      'step': span.step - half,
      'start': max(span.start, start) - start,
      'end': min(span.end, end) - start,
    }
    for span in spans
    if span.start < end and span.end > start and span.what != 'wait'
  ]


def _stages(model, played: evaluate_plan.Played) -> list[dict[str, Any]]:
  spent, free = reason.by_stage(played), slack.slack(played)
  tags = {}
  for flow in overview.flows(played.flow):
    for node in flow.nodes:
      if node.name in free and node.name not in tags:
        place = played.plan.places[played.plan.stages[node.name]]
        rows = played.plan.micro_batch.get(node.name)
        tags[node.name] = model.explain(flow, node, place, rows).total.tag
  return [
    {
      'name': name,
      'place': played.plan.stages[name],
      'micro_batch': played.plan.micro_batch.get(name),
      'seconds': spent.get(name, 0.0),
      'slack': free[name],
      'tag': tags.get(name, 'modeled'),
    }
    for name in free
  ]


def _places(flow, model, played: evaluate_plan.Played) -> list[dict[str, Any]]:
  plan, busy, made = played.plan, played.busy, []
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


def _compared(flow, played, best, seconds) -> dict[str, Any]:
  return {
    'plan': json.loads(played.plan.to_json()),
    'seconds': seconds,
    'more': seconds / best.seconds - 1 if best.seconds else 0.0,
    'in_a_line': overview.in_a_line(flow, played.plan),
    'parts': reason.parts(played)._asdict(),
    'reason': reason.reason(played, best)
    if played.plan != best.plan
    else 'the fastest',
  }


def _beside(flow, model, plan, best, ahead) -> dict[str, Any]:
  """How another plan does; if it cannot be had here, why."""
  most = max(d for place in plan.places.values() for d in place.devices)
  if most >= model.cluster.devices:
    return {'refused': f'it needs device {most}, which is not there.'}
  try:
    played = evaluate_plan.play(flow, model, plan, ahead)
  except ValueError as error:
    return {'refused': str(error)}
  return _compared(flow, played, best, played.seconds) | {
    'timeline': timeline(played)
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
    'in_a_line': plan and overview.in_a_line(flow, plan),
  }
