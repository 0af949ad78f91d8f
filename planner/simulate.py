"""Interprets programs with clocks: how long would a step take?"""

import collections
import dataclasses
from typing import NamedTuple

from planner import graph
from planner.program import (
  Evict,
  Recv,
  Repeat,
  Restore,
  Run,
  Send,
  SINK,
  SOURCE,
)


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
    loop: in the bodies of which loops it was, the outermost first: numbers of
      their nodes, each in the body of the one before. `node` and `value` are
      of the innermost.
  """

  step: int
  place: str
  what: str
  node: int | None
  value: int | None
  start: float
  end: float
  loop: tuple[int, ...] = ()


class Simulation(NamedTuple):
  """What came of it.

  Attributes:
    period: seconds from step to step once the pipeline is full.
    spans: what every place did, in its order.
  """

  period: float
  spans: list[Span]


@dataclasses.dataclass
class _Frame:
  """A program under way: of a step, or of a loop's body.

  Attributes:
    flow: what the program is of.
    program: of one round.
    rounds: those that are left, this one included.
    loop: as of `Span`.
    at: the next instruction.
  """

  flow: graph.Flow
  program: tuple
  rounds: int = 1
  loop: tuple[int, ...] = ()
  at: int = 0


class _Place:
  """Where a place is: in its program, and in which loops of it."""

  def __init__(self, name: str, flow: graph.Flow, program):
    self.name = name
    self.clock, self.step = 0.0, 0
    self.frames = [_Frame(flow, program)]
    self.ends = []

  @property
  def frame(self) -> _Frame:
    return self.frames[-1]

  def round(self):
    """Ends a round of the innermost program, or a step."""
    frame = self.frame
    frame.at, frame.rounds = 0, frame.rounds - 1
    if len(self.frames) == 1:
      self.ends.append(self.clock)
      self.step, frame.rounds = self.step + 1, 1
    elif not frame.rounds:
      self.frames.pop()

  def spend(self, spans, what, seconds, node=None, value=None):
    start, self.clock = self.clock, self.clock + seconds
    loop = self.frame.loop
    spans.append(
      Span(self.step, self.name, what, node, value, start, self.clock, loop)
    )


def simulate(
  flow: graph.Flow, programs, cost, steps: int = 8, ahead: int = 0
) -> Simulation:
  """Plays programs for some steps; a loop goes round as often as is expected.

  Args:
    flow: as cut and ordered.
    programs: of every place.
    cost: as `planner.costs.cost.Cost`.
    steps: how many to play. The period is that of the second half.
    ahead: steps that whoever calls may begin before an earlier one has ended:
      the workflow's lag.
  """
  places = [_Place(name, flow, p) for name, p in programs.items()]
  play = _Play(cost, places, ahead)
  while any(place.step < steps for place in places):
    moved = False
    for place in places:
      while place.step < steps and play.advance(place):
        moved = True
    if not moved:
      waits = {
        p.name: p.frame.program[p.frame.at] for p in places if p.step < steps
      }
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

  def __init__(self, cost, places: list[_Place], ahead: int):
    self.cost, self.places, self.ahead = cost, places, ahead
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
    loop = place.frame.loop
    if source == SOURCE:
      return place.clock if loop else self.begun(place.step)
    link = self.links[loop, v, source, place.name]
    return link.popleft() if link else None

  def advance(self, place: _Place) -> bool:
    """Does one instruction; False where it must wait for another place."""
    frame, cost = place.frame, self.cost
    if frame.at == len(frame.program):
      place.round()
      return True
    flow = frame.flow
    match frame.program[frame.at]:
      case Repeat(i, program):
        node, loop = flow.nodes[i], (*frame.loop, i)
        rounds = graph.rounds(node)
        place.frames.append(_Frame(node.body, program, rounds, loop))
      case Run(i):
        seconds = cost.seconds(flow, flow.nodes[i], place.name)
        place.spend(self.spans, 'run', seconds, node=i)
      case Send(v, target) if target != SINK:
        lasts = cost.transfer(flow, v, place.name, target)
        arrives = place.clock + lasts
        self.links[frame.loop, v, place.name, target].append(arrives)
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
    frame.at += 1
    return True
