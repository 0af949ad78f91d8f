"""All that is known of a plan that was found, as plain data for any reader.

What is said to people, in a terminal or on a page, is said from this.
"""

from collections.abc import Sequence
import json
from typing import Any

from planner import explain, graph, play
from planner import plan as plan_lib
from planner.search import exact
from planner.why import reason, sensitivity, slack

SHOWN = 5  # Plans, the best included.
DURING = ', during '  # Before the stage, in what a model says of memory.


def account(
  flow: graph.Flow,
  model,
  found: exact.Found,
  *,
  own: plan_lib.Plan | None = None,
  ranked: Sequence[tuple[plan_lib.Plan, float]] = (),
  ahead: int = 0,
  seconds: float = 30.0,
) -> dict[str, Any]:
  """Accounts for the fastest plan.

  Args:
    flow: as recorded.
    model: of the costs, a `planner.costs.roofline.Roofline`.
    found: what a search by this model has found.
    own: the plan of the recipe, to compare with; if it has none, that is the
      fastest that puts all on one place.
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
  best = play.play(flow, model, found.best, ahead)
  ranked = list(ranked) or found.ranked
  changes = sensitivity.sensitivity(
    *(flow, model, found, [plan for plan, _ in ranked]),
    ahead=ahead,
    seconds=seconds,
  )
  others = [play.play(flow, model, p, ahead) for p, _ in ranked[:SHOWN]]
  return twin | {
    **explain.to_json(best.flow, found.best, best.simulation),
    'seconds': found.seconds,
    'bottleneck': explain.bottleneck(best.flow, best.simulation),
    'timeline': timeline(best),
    'stages': _stages(model, best),
    'places': _places(flow, model, best),
    'ranked': [
      _compared(flow, other, best, seconds)
      for other, (_, seconds) in zip(others, ranked, strict=False)
    ],
    'beside': _beside(flow, model, own, ranked, best, ahead),
    'sensitivity': [_change(flow, change) for change in changes],
  }


def _cluster(cluster) -> dict[str, Any]:
  return {
    'device': cluster.device.name,
    'devices': cluster.devices,
    'memory': cluster.device.memory,
    'capacity': cluster.capacity,
  }


def timeline(played: play.Played) -> list[dict[str, Any]]:
  """What places do from the end of one step to that of the next.

  With an older state several steps are under way then.
  """
  spans = played.simulation.spans
  half = play.STEPS // 2
  start = max((s.end for s in spans if s.step == half - 1), default=0.0)
  end = start + played.simulation.period
  return [
    {
      'place': span.place,
      'what': span.what,
      'stage': explain.stage_of(played.flow, span),
      'step': span.step - half,
      'start': max(span.start, start) - start,
      'end': min(span.end, end) - start,
    }
    for span in spans
    if span.start < end and span.end > start and span.what != 'wait'
  ]


def _stages(model, played: play.Played) -> list[dict[str, Any]]:
  spent, free = reason.by_stage(played), slack.slack(played)
  tags = {}
  for flow in explain.flows(played.flow):
    for node in flow.nodes:
      if node.name in free and node.name not in tags:
        place = played.plan.places[played.plan.stages[node.name]]
        rows = played.plan.rows.get(node.name)
        tags[node.name] = model.explain(flow, node, place, rows).total.tag
  return [
    {
      'name': name,
      'place': played.plan.stages[name],
      'rows': played.plan.rows.get(name),
      'seconds': spent.get(name, 0.0),
      'slack': free[name],
      'tag': tags.get(name, 'modelled'),
    }
    for name in free
  ]


def _places(flow, model, played: play.Played) -> list[dict[str, Any]]:
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
    'in_a_line': explain.in_a_line(flow, played.plan),
    'parts': reason.parts(played)._asdict(),
    'reason': reason.reason(played, best)
    if played.plan != best.plan
    else 'the fastest',
  }


def _beside(flow, model, own, ranked, best, ahead) -> dict[str, Any] | None:
  """The plan that a recipe has, or the fastest that puts all on one place.

  If it cannot be had here, why; None if there is no other.
  """
  title = "The recipe's own plan"
  if own is None:
    title = 'The fastest on one place'
    one = [plan for plan, _ in ranked if len(plan.places) == 1]
    if not one or one[0] == best.plan:
      return None
    own = one[0]
  most = max(d for place in own.places.values() for d in place.devices)
  if most >= model.cluster.devices:
    why = f'it needs device {most}, which is not there.'
    return {'title': title, 'refused': why}
  try:
    played = play.play(flow, model, own, ahead)
  except ValueError as error:
    return {'title': title, 'refused': str(error)}
  return _compared(flow, played, best, played.seconds) | {
    'title': title,
    'timeline': timeline(played),
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
    'in_a_line': plan and explain.in_a_line(flow, plan),
  }
