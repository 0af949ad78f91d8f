"""Why one plan takes longer than another, in a clause.

A step takes what its busiest place has to do, what that place waits for others
even if moves took no time, and what moves add:

  seconds = work + waits + moves
"""

import collections
from typing import NamedTuple

from planner.costs import scaled
from planner.explain import formatting, overview
from planner.simulation import evaluate_plan

SAME = 5e-4  # Of the seconds: less is not worth a reason.

_say = formatting.seconds


class Parts(NamedTuple):
  """What the seconds of a step are made of.

  Attributes:
    place: the one with most to do.
    work: seconds that it does something.
    waits: seconds that it waits for other places to do something.
    moves: seconds that moves between places and to host memory add.
  """

  place: str
  work: float
  waits: float
  moves: float


def parts(evaluation: evaluate_plan.PlanEvaluation) -> Parts:
  """Takes the seconds of a step apart; they add up exactly."""
  still = _without_moves(evaluation)
  busy = still.busy
  place = max(busy, key=busy.get, default='')
  work = busy.get(place, 0.0)
  return Parts(
    place,
    work,
    max(0.0, still.seconds - work),
    max(0.0, evaluation.seconds - still.seconds),
  )


def _without_moves(
  evaluation: evaluate_plan.PlanEvaluation,
) -> evaluate_plan.PlanEvaluation:
  free = scaled.ScaledCosts(evaluation.cost, transfers=0.0, switches=0.0)
  return evaluate_plan.re_evaluate(evaluation, free)


def reason(
  evaluation: evaluate_plan.PlanEvaluation, best: evaluate_plan.PlanEvaluation
) -> str:
  """What a plan loses most by, against a faster one."""
  mine, its = parts(evaluation), parts(best)
  lost = evaluation.seconds - best.seconds
  if lost <= SAME * best.seconds:
    return 'as fast, within what matters'
  more = {
    'work': mine.work - its.work,
    'waits': mine.waits - its.waits,
    'moves': mine.moves - its.moves,
  }
  most = max(more, key=more.get)
  said = {'work': _work, 'waits': _waits, 'moves': _moves}[most]
  return said(evaluation, best, mine, its)


def _work(evaluation, best, mine, its) -> str:
  if len(evaluation.plan.places) == 1 < len(best.plan.places):
    return (
      f'nothing overlaps: one place does all of {_say(mine.work)}, where the '
      f'busiest of the fastest does {_say(its.work)}'
    )
  spent, before = by_stage(evaluation), by_stage(best)
  here = overview.busy(evaluation.flow, evaluation.simulation)[mine.place]
  # What the busiest place does that the fastest plan does not do there, or
  # does faster.
  there = overview.busy(best.flow, best.simulation).get(its.place, {})
  stage = max(here, key=lambda s: here[s] - there.get(s, 0.0))
  said = f'{mine.place} has {_say(mine.work)} of work against {_say(its.work)}'
  if stage in there:
    return (
      f'{said}: {stage} takes {_say(here[stage])}, not {_say(there[stage])}'
    )
  if stage in before:
    also = f', {_say(before[stage])} there' * (
      abs(spent[stage] - before[stage]) > SAME * best.seconds
    )
    return (
      f'{said}: it also has {stage} ({_say(here[stage])}{also}), which the '
      f'fastest has elsewhere'
    )
  return f'{said}, most of it {stage} ({_say(here[stage])})'


def _waits(evaluation, best, mine, its) -> str:
  said = (
    f'{mine.place}, the busiest place, waits {_say(mine.waits)} of a '
    f'step against {_say(its.waits)}'
  )
  meanwhile = _meanwhile(_without_moves(evaluation), mine.place)
  if not meanwhile:
    return said
  return f'{said}, most of it while {max(meanwhile, key=meanwhile.get)} runs'


def _meanwhile(evaluation, place: str) -> dict[str, float]:
  """Seconds that stages run elsewhere while a place waits, in the first step.

  Whose value it waits for says less: its maker may have stood in a queue.
  """
  first = [span for span in evaluation.simulation.spans if span.step == 0]
  waits = [s for s in first if s.place == place and s.what == 'wait']
  spent = collections.Counter()
  for span in first:
    stage = overview.stage_of(evaluation.flow, span)
    if stage and span.place != place:
      for wait in waits:
        both = min(span.end, wait.end) - max(span.start, wait.start)
        spent[stage] += max(0.0, both)
  return {stage: seconds for stage, seconds in spent.items() if seconds}


def _moves(evaluation, best, mine, its) -> str:
  said = f'moves add {_say(mine.moves)} against {_say(its.moves)}'
  if evaluation.plan.offload and not best.plan.offload:
    return (
      f'{said}: {", ".join(evaluation.plan.offload)} go to host memory and back'
    )
  found = overview.moves(evaluation.flow, evaluation.plan)
  if found:
    way, size = next(iter(found.items()))
    return f'{said}: {way} is {formatting.byte_size(size)}'
  return said


def by_stage(evaluation: evaluate_plan.PlanEvaluation) -> dict[str, float]:
  """Seconds of a step that each stage takes, wherever it is."""
  spent = collections.Counter()
  for stages in overview.busy(evaluation.flow, evaluation.simulation).values():
    spent.update(stages)
  return dict(spent)
