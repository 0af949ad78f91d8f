"""Why one plan takes longer than another, in a clause.

A step takes what its busiest place has to do, what that place waits for others
even if moves took no time, and what moves add:

  seconds = work + waits + moves
"""

import collections
from typing import NamedTuple

from planner import explain, graph, listing, play
from planner.costs import scaled

SAME = 5e-4  # Of the seconds: less is not worth a reason.


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


def parts(played: play.Played) -> Parts:
  """Takes the seconds of a step apart; they add up exactly."""
  still = _without_moves(played)
  busy = still.busy
  place = max(busy, key=busy.get, default='')
  work = busy.get(place, 0.0)
  return Parts(
    place,
    work,
    max(0.0, still.seconds - work),
    max(0.0, played.seconds - still.seconds),
  )


def _without_moves(played: play.Played) -> play.Played:
  free = scaled.Scaled(played.cost, transfers=0.0, switches=0.0)
  return play.again(played, free)


def reason(played: play.Played, best: play.Played) -> str:
  """What a plan loses most by, against a faster one."""
  mine, its = parts(played), parts(best)
  lost = played.seconds - best.seconds
  if lost <= SAME * best.seconds:
    return 'as fast, within what matters'
  more = {
    'work': mine.work - its.work,
    'waits': mine.waits - its.waits,
    'moves': mine.moves - its.moves,
  }
  most = max(more, key=more.get)
  said = {'work': _work, 'waits': _waits, 'moves': _moves}[most]
  return said(played, best, mine, its)


def _work(played, best, mine, its) -> str:
  if len(played.plan.places) == 1 < len(best.plan.places):
    return (
      f'nothing overlaps: one place does all of {_s(mine.work)}, where the '
      f'busiest of the fastest does {_s(its.work)}'
    )
  spent, before = by_stage(played), by_stage(best)
  here = explain.busy(played.flow, played.simulation)[mine.place]
  # What the busiest place does that the fastest plan does not do there, or
  # does faster.
  there = explain.busy(best.flow, best.simulation).get(its.place, {})
  stage = max(here, key=lambda s: here[s] - there.get(s, 0.0))
  said = f'{mine.place} has {_s(mine.work)} of work against {_s(its.work)}'
  if stage in there:
    return f'{said}: {stage} takes {_s(here[stage])}, not {_s(there[stage])}'
  if stage in before:
    also = f', {_s(before[stage])} there' * (
      abs(spent[stage] - before[stage]) > SAME * best.seconds
    )
    return (
      f'{said}: it also has {stage} ({_s(here[stage])}{also}), which the '
      f'fastest has elsewhere'
    )
  return f'{said}, most of it {stage} ({_s(here[stage])})'


def _waits(played, best, mine, its) -> str:
  still = _without_moves(played)
  waited = collections.Counter()
  for span in still.simulation.spans:
    if span.step == 0 and span.what == 'wait' and span.place == mine.place:
      waited[_maker(played.flow, span)] += span.end - span.start
  said = (
    f'{mine.place}, the busiest place, waits {_s(mine.waits)} of a step '
    f'against {_s(its.waits)}'
  )
  return f'{said}, most for {max(waited, key=waited.get)}' if waited else said


def _maker(flow, span) -> str:
  """The stage that a place waits for, through what only moves rows."""
  for i in span.loop:
    flow = flow.nodes[i].body
  v = span.value
  while v in flow.maker:
    node = flow.nodes[flow.maker[v]]
    if not graph.is_plumbing(node) or not node.reads:
      return node.name
    v = node.reads[-1]
  return 'the step before'


def _moves(played, best, mine, its) -> str:
  said = f'moves add {_s(mine.moves)} against {_s(its.moves)}'
  if played.plan.evict and not best.plan.evict:
    return f'{said}: {", ".join(played.plan.evict)} go to host memory and back'
  found = explain.moves(played.flow, played.plan)
  if found:
    way, size = next(iter(found.items()))
    return f'{said}: {way} is {listing.size(size)}'
  return said


def by_stage(played: play.Played) -> dict[str, float]:
  """Seconds of a step that each stage takes, wherever it is."""
  spent = collections.Counter()
  for stages in explain.busy(played.flow, played.simulation).values():
    spent.update(stages)
  return dict(spent)


def _s(seconds: float) -> str:
  return f'{seconds:.3g} s'
