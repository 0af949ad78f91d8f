"""Explains in a clause why one plan takes longer than another.

The seconds of a step are those that its busiest place works, those that this
place would wait for others if moves took no time, and those that moves add:

  seconds = work + waits + moves
"""

import collections
from typing import NamedTuple

from planner import formatting
from planner.costs import scaled
from planner.explain import overview
from planner.simulation import evaluate_plan

SAME = 5e-4  # Of the seconds: less is not worth a reason.

_format = formatting.seconds


class Parts(NamedTuple):
  """The components of the seconds of a step.

  Attributes:
    place: the busiest place.
    work: seconds in which it works.
    waits: seconds in which it waits for the work of other places.
    moves: seconds that transfers and moves to host memory add.
  """

  place: str
  work: float
  waits: float
  moves: float


def parts(evaluation: evaluate_plan.PlanEvaluation) -> Parts:
  """Splits the seconds of a step into components that add up exactly."""
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
  """Names the component by which a plan loses most against the best one found.

  A search that was stopped may have missed a faster plan, such as the recipe's
  own, and then it says so.
  """
  mine, its = parts(evaluation), parts(best)
  lost = evaluation.seconds - best.seconds
  if lost < -SAME * best.seconds:
    return 'faster: the search ended before it came to this plan'
  if lost <= SAME * best.seconds:
    return f'as fast, to {100 * SAME:g} %'
  more = {
    'work': mine.work - its.work,
    'waits': mine.waits - its.waits,
    'moves': mine.moves - its.moves,
  }
  most = max(more, key=more.get)
  describe = {'work': _work, 'waits': _waits, 'moves': _moves}[most]
  return describe(evaluation, best, mine, its)


def _work(evaluation, best, mine, its) -> str:
  if len(evaluation.plan.places) == 1 < len(best.plan.places):
    return (
      f'nothing overlaps: one place works {_format(mine.work)}, the busiest '
      f'place of the fastest plan {_format(its.work)}'
    )
  spent, before = by_stage(evaluation), by_stage(best)
  here = overview.busy(evaluation.flow, evaluation.simulation)[mine.place]
  # The stage that the fastest plan runs elsewhere, or faster.
  there = overview.busy(best.flow, best.simulation).get(its.place, {})
  stage = max(here, key=lambda s: here[s] - there.get(s, 0.0))
  clause = (
    f'the busiest place, {mine.place}, works {_format(mine.work)}, not '
    f'{_format(its.work)}'
  )
  if stage in there:
    return (
      f'{clause}: {stage} takes {_format(here[stage])}, not '
      f'{_format(there[stage])}'
    )
  if stage in before:
    also = f', {_format(before[stage])} there' * (
      abs(spent[stage] - before[stage]) > SAME * best.seconds
    )
    return (
      f'{clause}: it also runs {stage} ({_format(here[stage])}{also}), which '
      'the fastest plan runs elsewhere'
    )
  return f'{clause}, most of it {stage} ({_format(here[stage])})'


def _waits(evaluation, best, mine, its) -> str:
  clause = (
    f'the busiest place, {mine.place}, waits {_format(mine.waits)} of a step, '
    f'not {_format(its.waits)}'
  )
  meanwhile = _meanwhile(_without_moves(evaluation), mine.place)
  if not meanwhile:
    return clause
  return f'{clause}, most of it while {max(meanwhile, key=meanwhile.get)} runs'


def _meanwhile(evaluation, place: str) -> dict[str, float]:
  """Returns seconds that stages run elsewhere while a place waits.

  These are seconds of the first step. The maker of the awaited value says less,
  since it may itself have waited for another stage.
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
  clause = f'moves add {_format(mine.moves)}, not {_format(its.moves)}'
  if evaluation.plan.offload and not best.plan.offload:
    names = ', '.join(evaluation.plan.offload)
    return f'{clause}: {names} go to host memory and back'
  found = overview.moves(evaluation)
  if found:
    way, size = next(iter(found.items()))
    return f'{clause}: {way} is {formatting.byte_size(size)}'
  return clause


def by_stage(evaluation: evaluate_plan.PlanEvaluation) -> dict[str, float]:
  """Returns the seconds of a step that each stage takes, over all places."""
  spent = collections.Counter()
  for stages in overview.busy(evaluation.flow, evaluation.simulation).values():
    spent.update(stages)
  return dict(spent)
