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
    cost: as `planner.costs.cost.Cost`.
    steps: how many to play. The period is that of the second half.
    ahead: steps that whoever calls may begin before an earlier one has ended:
      the workflow's lag.
  """
  places = [_Place(name, p, steps) for name, p in programs.items()]
  play = _Play(flow, cost, places, ahead)
  while any(place.step < steps for place in places):
    moved = False
    for place in places:
      while place.step < steps and play.advance(place):
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
  return Simulation(period, play.spans)


class _Play:
  """Programs under way, and what is on its way between them."""

  def __init__(self, flow, cost, places: list[_Place], ahead: int):
    self.flow, self.cost, self.places, self.ahead = flow, cost, places, ahead
    self.links = collections.defaultdict(collections.deque)
    self.spans: list[Span] = []

  def begun(self, step: int) -> float | None:
    """When the inputs of a step are there; None if that is not known yet."""
    before = step - 1 - self.ahead
    if before < 0:
      return 0.0
    ends = [place.ends[before : before + 1] for place in self.places]
    return max(end for (end,) in ends) if all(ends) else None

  def arrival(self, place: _Place, v: int, source: str) -> float | None:
    """When a value is there; None if that is not known yet."""
    if source == SOURCE:
      return self.begun(place.step)
    link = self.links[v, source, place.name]
    return link.popleft() if link else None

  def advance(self, place: _Place) -> bool:
    """Does one instruction; False where it must wait for another place."""
    if place.at == len(place.program):
      place.ends.append(place.clock)
      place.step, place.at = place.step + 1, 0
      return True
    flow, cost = self.flow, self.cost
    match place.program[place.at]:
      case Run(i):
        seconds = cost.seconds(flow, flow.nodes[i], place.name)
        place.spend(self.spans, 'run', seconds, node=i)
      case Send(v, target) if target != SINK:
        lasts = cost.transfer(flow, v, place.name, target)
        self.links[v, place.name, target].append(place.clock + lasts)
      case Recv(v, source):
        arrives = self.arrival(place, v, source)
        if arrives is None:
          return False
        if arrives > place.clock:
          place.spend(self.spans, 'wait', arrives - place.clock, value=v)
      case (Evict(v) | Restore(v)) as op:
        what = 'evict' if isinstance(op, Evict) else 'restore'
        seconds = cost.switch(flow, v, place.name)
        place.spend(self.spans, what, seconds, value=v)
    place.at += 1
    return True
