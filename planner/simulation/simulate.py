"""Interprets programs with clocks: how long would a step take?"""

import collections
import itertools
from typing import NamedTuple

from planner.ir import graph
from planner.lower.program import (
  Acquire,
  Begin,
  Offload,
  Recv,
  Release,
  Repeat,
  Restore,
  Run,
  Send,
  SINK,
  SOURCE,
)
from planner.simulation import clock


def outside(place: str, stage: str) -> str:
  """Who does what a place has begun of a stage, one call after the other."""
  return f'{place}: {stage}'


class Simulation(NamedTuple):
  """What came of it.

  Attributes:
    period: seconds from step to step once the pipeline is full.
    spans: what every place did, in its order.
  """

  period: float
  spans: list[clock.Span]


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
  places = [clock.Place(name, flow, p) for name, p in programs.items()]
  play = _Play(cost, places, ahead, steps)
  while play.under_way():
    play.begin()
    play.end()
  ends = [max(place.ends[i] for place in places) for i in range(steps)]
  half = steps // 2
  period = (ends[-1] - ends[half - 1]) / (steps - half) if half else ends[-1]
  return Simulation(period, play.spans)


class _Play:
  """Programs under way, and what is on its way between them."""

  def __init__(self, cost, places: list[clock.Place], ahead: int, steps: int):
    self.cost, self.places = cost, places
    self.ahead, self.steps, self.now = ahead, steps, 0.0
    self.sharing = {place.name for place in places if place.shares}
    self.links = collections.defaultdict(collections.deque)
    self.spans: list[clock.Span] = []
    self.running: dict[str, clock.Task] = {}
    self.taken: set[tuple[int, ...]] = set()  # Shared devices.
    # Who waits for those, by place: rank, and number in line.
    self.lines = collections.defaultdict(dict)
    self.numbers = itertools.count()

  def under_way(self) -> bool:
    return any(place.step < self.steps for place in self.places)

  def begin(self):
    """Lets all places go on that can, to what keeps them next."""
    moved = True
    while moved:
      moved = False
      for place in self.places:
        while not place.task and place.step < self.steps and self.go_on(place):
          moved = True
    running = {
      p.name: p.task for p in self.places if p.task and p.task.what == 'run'
    }
    if running != self.running:
      self.running = running
      self.crowd()

  def crowd(self):
    """Calls that run side by side may keep each other from running."""
    for place in self.places:
      if task := self.running.get(place.name):
        beside = tuple(name for name in self.running if name != place.name)
        node = place.frame.flow.nodes[task.node]
        slow = self.cost.crowding(node, place.name, beside)
        if slow != task.slow:
          task.change(self.now, slow)

  def end(self):
    """Lets time pass until something ends."""
    tasks = [place.task for place in self.places if place.task]
    if not tasks and self.under_way():
      waits = {p.name: p.next for p in self.places if p.step < self.steps}
      raise RuntimeError(
        f'The programs wait for each other, at {waits}: this is a fault of '
        'lowering, not of the plan.'
      )
    self.now = min((task.end for task in tasks), default=self.now)
    for place in self.places:
      task = place.task
      if task and task.end <= self.now:
        place.task = None
        if isinstance(place.next, Release):
          self.free(place)
        if task.what != 'wait':  # Which ends as the value is received.
          self.note(place, task.what, task.node, task.value)

  def note(self, place: clock.Place, what, node=None, value=None):
    """Something has ended now, and its place goes on."""
    self.spans.append(place.span(what, self.now, node, value))
    place.frame.at += 1

  def keep(
    self, place: clock.Place, what, seconds, node=None, value=None
  ) -> bool:
    """Keeps a place for some seconds; for none, it goes on at once."""
    if seconds > 0:
      place.task = clock.Task(what, seconds, self.now, node, value)
      return False
    self.note(place, what, node, value)
    return True

  def begun(self, step: int) -> bool:
    """Whether the inputs of a step are there."""
    before = step - 1 - self.ahead
    return before < 0 or all(len(p.ends) > before for p in self.places)

  def arrival(self, place: clock.Place, v: int, source: str) -> float | None:
    """When a value is there; None if that is not known yet."""
    loop = place.frame.loop
    if source == SOURCE:
      return self.now if loop or self.begun(place.step) else None
    link = self.links[loop, v, source, place.name]
    return link[0] if link else None

  def go_on(self, place: clock.Place) -> bool:
    """Does one instruction; False where its place is kept, or must wait."""
    frame, cost = place.frame, self.cost
    if frame.at == len(frame.program):
      place.round()
      return True
    flow = frame.flow
    if place.shares:
      frame.follow(frame.program[frame.at])
    match frame.program[frame.at]:
      case Repeat() as op:
        place.frames.append(clock.inner(frame, op))
      case Begin(i):
        self.ahead_of_turn(place, i)
      case Run(i) if (frame.loop, i) in place.begun:
        return self.await_end(place, i)
      case Run(i):
        seconds = cost.seconds(flow, flow.nodes[i], place.name)
        return self.keep(place, 'run', seconds, node=i)
      case Send(v, target) if target != SINK:
        lasts = cost.transfer(flow, v, place.name, target)
        if target in self.sharing and v in frame.there:
          lasts += cost.switch(flow, v, place.name)  # It waits on the host.
        link = self.links[frame.loop, v, place.name, target]
        link.append(self.now + lasts)
      case Recv(v, source):
        return self.receive(place, v, source)
      case Acquire(devices, rank, values):
        return self.take(place, devices, rank, values)
      case Release(v, source):
        return self.let_go(place, v, source)
      case (Offload(v) | Restore(v)) as op:
        what = 'offload' if isinstance(op, Offload) else 'restore'
        seconds = cost.switch(flow, v, place.name)
        return self.keep(place, what, seconds, value=v)
    frame.at += 1
    return True

  def ahead_of_turn(self, place: clock.Place, i: int):
    """Begins a call, which is made when those of its stage before it are."""
    flow, loop = place.frame.flow, place.frame.loop
    seconds = self.cost.seconds(flow, flow.nodes[i], place.name)
    name = outside(place.name, flow.nodes[i].name)
    start = max(self.now, place.free[name])
    end = place.free[name] = place.begun[loop, i] = start + seconds
    if seconds > 0:
      self.spans.append(
        clock.Span(place.step, name, 'run', i, None, start, end, loop)
      )

  def await_end(self, place: clock.Place, i: int) -> bool:
    """Takes what a call has made, or waits for it; False until it is made."""
    frame = place.frame
    if place.begun[frame.loop, i] > self.now:
      place.task = clock.Task('wait', 0.0, place.begun[frame.loop, i])
      return False
    del place.begun[frame.loop, i]
    if self.now > place.clock:
      self.note(place, 'wait', value=frame.flow.nodes[i].writes[0])
    else:
      frame.at += 1
    return True

  def receive(self, place: clock.Place, v: int, source: str) -> bool:
    """Takes a value, or waits for it; False if it is not there."""
    arrives = self.arrival(place, v, source)
    if arrives is None:
      return False
    if arrives > self.now:
      place.task = clock.Task('wait', 0.0, arrives)
      return False
    if source != SOURCE:
      self.links[place.frame.loop, v, source, place.name].popleft()
    if self.now > place.clock:
      self.note(place, 'wait', value=v)
    else:
      place.frame.at += 1
    return True

  def take(self, place: clock.Place, devices, rank: int, values) -> bool:
    """Takes shared devices, or waits for its turn; False until it has them."""
    frame, line = place.frame, self.lines[devices]
    if not place.has:
      line.setdefault(place.name, (rank, next(self.numbers)))
      if devices in self.taken or place.name != min(line, key=line.get):
        return False
      del line[place.name]
      self.taken.add(devices)
      place.has = devices
      if self.now > place.clock:
        self.spans.append(place.span('wait', self.now))
    away = [v for v in values if v not in frame.there]
    frame.there.update(away)
    return self.switch(place, 'restore', ((frame.flow, v) for v in away))

  def let_go(self, place: clock.Place, v: int | None, source: str) -> bool:
    """Lets shared devices go, unless what it will wait for is there."""
    if v is not None:
      arrives = self.arrival(place, v, source)
      if arrives is not None and arrives <= self.now:
        place.frame.at += 1
        return True
    held = []
    for frame in place.frames:
      held += [(frame.flow, v) for v in (*frame.there, *frame.kept)]
      frame.there, frame.kept, frame.given = set(), set(), set()
    return self.switch(place, 'offload', held)

  def switch(self, place: clock.Place, what: str, moved) -> bool:
    """Moves values between devices and host, which keeps a place."""
    seconds = sum(self.cost.switch(flow, v, place.name) for flow, v in moved)
    if seconds > 0:
      place.task = clock.Task(what, seconds, self.now)
      return False
    if what == 'offload':
      self.free(place)
    place.frame.at += 1
    return True

  def free(self, place: clock.Place):
    """Others may have the devices that it shares."""
    self.taken.discard(place.has)
    place.has = None
