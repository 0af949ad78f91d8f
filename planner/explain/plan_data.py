"""Explains a plan as plain data, the source of all reports of it."""

from collections.abc import Mapping, Sequence
import json
import typing
from typing import Any

from planner.costs import measured
from planner.explain import (
  offload,
  overview,
  reason,
  remat,
  sensitivity,
  slack,
)
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import deadline as deadline_lib
from planner.search import result as result_lib
from planner.simulation import evaluate_plan

SHOWN = 5  # Plans, the best included.
DURING = ', during '  # Separates a part of memory from its stage.


def plan_data(
  flow: graph.Flow,
  model,
  found: result_lib.SearchResult,
  *,
  others: Mapping[str, plan_lib.Plan | None] | None = None,
  ranked: Sequence[tuple[plan_lib.Plan, float]] = (),
  staleness: int = 0,
  deadline: deadline_lib.Deadline = deadline_lib.NEVER,
) -> dict[str, Any]:
  """Explains the fastest plan as data.

  Args:
    flow: as recorded.
    model: the cost model, a `planner.costs.roofline.Roofline`.
    found: the result of a search with this model.
    others: plans to compare with, by title; None for one that there was no
      time for.
    ranked: plans to compare with and their seconds, fastest first.
    staleness: as in that search.
    deadline: when to stop. Slacks, reasons and changes that there was no time
      for are left out.

  Returns:
    Data that can be written as JSON. If no plan fits, it has only the plans
    that are nearest to fitting.
  """
  data = {
    'cluster': _cluster(model.cluster),
    'space': json.loads(found.space.to_json()),
    'searched': {
      'simulated': found.simulated,
      'bounded': found.tried,
      'gap': found.gap,
      'proved': found.proved,
    },
    'ranked': [],
    'infeasible': [
      {'plan': json.loads(plan.to_json()), 'reason': words}
      for plan, words in found.infeasible
    ],
  }
  if found.best is None:
    return data
  best = evaluate_plan.evaluate(flow, model, found.best, staleness)
  ranked = list(ranked) or found.ranked
  stages = _stages(model, best, deadline)
  compared = [
    _compared(flow, other, best, seconds)
    for other, seconds in _evaluated(flow, model, ranked, staleness, deadline)
  ]
  alternatives = [
    {'title': title} | _alternative(flow, model, plan, best, staleness)
    for title, plan in (others or {}).items()
  ]
  assumed = [stage['name'] for stage in stages if stage['tag'] == 'assumed']
  changes = sensitivity.sensitivity(
    flow,
    model,
    found,
    known=[plan for plan, _ in ranked],
    staleness=staleness,
    deadline=deadline,
    assumed=assumed,
  )
  every = sensitivity.all_changes(flow, found, assumed)
  return data | {
    **overview.to_json(best),
    'seconds': found.seconds,
    'bottleneck': overview.bottleneck(
      best.flow, best.simulation, found.seconds
    ),
    'timeline': timeline(best),
    'stages': stages,
    'places': _places(flow, model, best),
    'ranked': compared,
    'alternatives': alternatives,
    'sensitivity': [_change(flow, change) for change in changes],
    'sensitivity_left': len(every) - len(changes),
    'known': _known(best, stages),
    'guesses': [
      change.cost for change in changes if change.plan and change.is_guess
    ],
    'remat': remat.to_data(flow, model, found.best),
    'offload': offload.to_data(flow, model, found.best),
  }


def _evaluated(flow, model, ranked, staleness, deadline):
  """Yields evaluations of the fastest plans and their seconds, in time."""
  for i, (plan, seconds) in enumerate(ranked[:SHOWN]):
    if not i or not deadline.has_passed:
      yield evaluate_plan.evaluate(flow, model, plan, staleness), seconds


def _cluster(cluster) -> dict[str, Any]:
  return {
    'device': cluster.device.name,
    'devices': cluster.num_devices,
    'memory': cluster.device.memory_bytes,
    'capacity': cluster.capacity,
  }


def timeline(evaluation: evaluate_plan.PlanEvaluation) -> list[dict[str, Any]]:
  """Returns what places do in a period, as `overview.of_a_period`."""
  return [
    {
      'place': span.place,
      'what': span.what,
      'stage': overview.stage_of(evaluation.flow, span),
      'piece': _piece(evaluation.flow, span),
      'step': span.step,
      'start': span.start,
      'end': span.end,
    }
    for span in overview.of_a_period(evaluation.simulation)
    if span.what != 'wait'
  ]


def _piece(flow, span) -> tuple[int, int] | None:
  """Returns the index of a span's piece, and the number of pieces."""
  node = overview.node_of(flow, span)
  return node and tuple(node.piece)


def _stages(
  model, evaluation: evaluate_plan.PlanEvaluation, deadline
) -> list[dict[str, Any]]:
  spent, free = reason.by_stage(evaluation), slack.slack(evaluation, deadline)
  tags, grains = {}, {}
  for flow in overview.flows(evaluation.flow):
    for node in flow.nodes:
      if node.name in free and node.name not in tags:
        place = evaluation.plan.places[evaluation.plan.stages[node.name]]
        execution = evaluation.plan.execution(node.name)
        found = model.explain(flow, node, place, *execution)
        tags[node.name] = found.total.tag
        grains[node.name] = node.stage.grain
  return [
    {
      'name': name,
      'place': evaluation.plan.stages[name],
      'micro_batch': evaluation.plan.micro_batch.get(name),
      'remat': evaluation.plan.remat.get(name),
      'seconds': spent.get(name, 0.0),
      'slack': free[name],
      'tag': tags.get(name, 'modeled'),
      'grain': grains[name],
    }
    for name in free
  ]


def _known(evaluation, stages) -> dict[str, float]:
  """Returns the fraction of all busy seconds that has each tag."""
  tags = {stage['name']: stage['tag'] for stage in stages}
  shares = dict.fromkeys(typing.get_args(measured.Tag), 0.0)
  spent = reason.by_stage(evaluation)
  total = sum(spent.values())
  for name, seconds in spent.items():
    shares[tags.get(name, 'modeled')] += seconds / total if total else 0.0
  return shares


def _places(
  flow, model, evaluation: evaluate_plan.PlanEvaluation
) -> list[dict[str, Any]]:
  plan, busy, places = evaluation.plan, evaluation.busy, []
  for name, place in plan.places.items():
    memory = model.explain_memory(flow, plan, name)
    places.append(
      {
        'name': name,
        'devices': list(place.devices),
        'axes': [list(axis) for axis in place.axes],
        'stages': [s for s in flow.stages if plan.stages[s] == name],
        'busy_seconds': busy.get(name, 0.0),
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
  return places


def _compared(flow, evaluation, best, seconds) -> dict[str, Any]:
  return {
    'plan': json.loads(evaluation.plan.to_json()),
    'seconds': seconds,
    'relative_slowdown': seconds / best.seconds - 1 if best.seconds else 0.0,
    'summary': overview.one_line(flow, evaluation.plan),
    'parts': reason.parts(evaluation)._asdict(),
    'reason': reason.reason(evaluation, best)
    if evaluation.plan != best.plan
    else 'the fastest',
  }


def _alternative(flow, model, plan, best, staleness) -> dict[str, Any]:
  """Compares another plan with the best one, or says why it cannot."""
  if plan is None:
    return {'refused': 'is not known: time was up.'}
  most = max(d for place in plan.places.values() for d in place.devices)
  if most >= model.cluster.num_devices:
    return {
      'refused': f'cannot run here: it needs device {most}, which the cluster '
      'lacks.'
    }
  try:
    evaluation = evaluate_plan.evaluate(flow, model, plan, staleness)
  except ValueError as error:
    return {'refused': f'cannot run here: {error}'}
  return _compared(flow, evaluation, best, evaluation.seconds) | {
    'timeline': timeline(evaluation)
  }


def _change(flow, change: sensitivity.Change) -> dict[str, Any]:
  plan = change.plan
  return {
    'cost': change.cost,
    'factor': change.factor,
    'before': change.before,
    'seconds': change.seconds,
    'gain': change.gain,
    'proved': change.proved,
    'plan': plan and json.loads(plan.to_json()),
    'summary': plan and overview.one_line(flow, plan),
  }
