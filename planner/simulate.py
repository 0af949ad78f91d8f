"""Interprets programs with clocks: how long would a step take?"""

import collections
from typing import NamedTuple

from planner import graph
from planner.program import Evict, Recv, Restore, Run, Send, SINK, SOURCE


class Span(NamedTuple):
  """Something that a place did.

  Attributes:
    step: in which step, from zero.
    place: where.
    what: 'run', 'wait', 'evict' or 'restore'.
    node: which node ran; None for the rest.
    value: which value was waited for or moved; None for a run.
    start: seconds since the beginning.
    end: likewise.
  """

  step: int
  place: str
  what: str
  node: int | None
  value: int | None
  start: float
  end: float


class Simulation(NamedTuple):
  """What came of it.

  Attributes:
    period: seconds from step to step once the pipeline is full.
    spans: what every place did, in its order.
  """

  period: float
  spans: list[Span]


class _Place:
  """Where a place is in its program."""

  def __init__(self, name: str, program, steps: int):
    self.name, self.program, self.steps = name, program, steps
    self.clock, self.step, self.at = 0.0, 0, 0
    self.ends = []

  def spend(self, spans, what, seconds, node=None, value=None):
    start, self.clock = self.clock, self.clock + seconds
    spans.append(
      Span(self.step, self.name, what, node, value, start, self.clock)
    )


def simulate(
  flow: graph.Flow, programs, cost, steps: int = 8, ahead: int = 0
) -> Simulation:
  """Plays programs for some steps.

  Args:
    flow: as cut and ordered.
    programs: of every place.
    cost: as `planner.cost.Cost`.
    steps: how many to play. The period is that of the second half.
    ahead: steps that whoever calls may begin before an earlier one has ended:
      the workflow's lag.
  """
  places = [_Place(name, p, steps) for name, p in programs.items()]
  links = collections.defaultdict(collections.deque)
  spans, sunk = [], collections.defaultdict(list)

  def begun(step):
    """When the inputs of a step are there; None if that is not known yet."""
    before = step - 1 - ahead
    if before < 0:
      return 0.0
    ends = [place.ends[before : before + 1] for place in places]
    return max(end for (end,) in ends) if all(ends) else None

  def advance(place) -> bool:
    """Does one instruction; False where it must wait for another place."""
    if place.at == len(place.program):
      place.ends.append(place.clock)
      place.step, place.at = place.step + 1, 0
      return True
    op = place.program[place.at]
    match op:
      case Run(i):
        seconds = cost.seconds(flow, flow.nodes[i], place.name)
        place.spend(spans, 'run', seconds, node=i)
      case Send(v, target) if target == SINK:
        sunk[place.step].append(place.clock)
      case Send(v, target):
        lasts = cost.transfer(flow, v, place.name, target)
        links[v, place.name, target].append(place.clock + lasts)
      case Recv(v, source):
        if source == SOURCE:
          arrives = begun(place.step)
        else:
          link = links[v, source, place.name]
          arrives = link.popleft() if link else None
        if arrives is None:
          return False
        if arrives > place.clock:
          place.spend(spans, 'wait', arrives - place.clock, value=v)
      case Evict(v) | Restore(v):
        what = 'evict' if isinstance(op, Evict) else 'restore'
        seconds = cost.switch(flow, v, place.name)
        place.spend(spans, what, seconds, value=v)
    place.at += 1
    return True

  while any(place.step < steps for place in places):
    moved = False
    for place in places:
      while place.step < steps and advance(place):
        moved = True
    if not moved:
      waits = {p.name: p.program[p.at] for p in places if p.step < steps}
      raise RuntimeError(
        f'The programs wait for each other, at {waits}: this is a fault of '
        'lowering, not of the plan.'
      )
  ends = [max(place.ends[i] for place in places) for i in range(steps)]
  half = steps // 2
  period = (ends[-1] - ends[half - 1]) / (steps - half) if half else ends[-1]
  return Simulation(period, spans)
