"""Simulates programs with clocks to predict the time of a step."""

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


def background(place: str, stage: str) -> str:
  """Names the worker that runs a place's asynchronous calls of a stage.

  It runs them one after another.
  """
  return f'{place}: {stage}'


class Simulation(NamedTuple):
  """The result of a simulation.

  Attributes:
    period: seconds from step to step once the pipeline is full.
    spans: the intervals of every place, in order.
  """

  period: float
  spans: list[clock.Span]


def simulate(
  flow: graph.Flow, programs, cost, steps: int = 8, staleness: int = 0
) -> Simulation:
  """Simulates the programs of all places for some steps.

  A loop runs the number of rounds that is expected of it. Later steps that may
  begin before the last one has ended are simulated, too: without them, the last
  steps would have the places to themselves, and end early.

  Args:
    flow: cut and ordered.
    programs: the program of each place.
    cost: a `cost.Cost`.
    steps: number of steps. The second half gives the period.
    staleness: number of steps that may begin before an earlier one has ended.
  """
  places = [clock.Place(name, flow, p) for name, p in programs.items()]
  simulator = _Simulator(cost, places, staleness, steps + staleness)
  while simulator.running():
    simulator.start_tasks()
    simulator.advance()
  ends = [max(place.ends[i] for place in places) for i in range(steps)]
  half = steps // 2
  period = (ends[-1] - ends[half - 1]) / (steps - half) if half else ends[-1]
  return Simulation(period, [x for x in simulator.spans if x.step < steps])


class _Simulator:
  """The state of all places and of the links between them."""

  def __init__(
    self, cost, places: list[clock.Place], staleness: int, steps: int
  ):
    self.cost, self.places = cost, places
    self.staleness, self.steps, self.now = staleness, steps, 0.0
    self.sharing = {place.name for place in places if place.shares}
    self.links = collections.defaultdict(collections.deque)
    self.spans: list[clock.Span] = []
    self.tasks: dict[str, clock.Task] = {}
    self.taken: set[tuple[int, ...]] = set()  # Shared devices.
    # Places that wait for them: rank, and number in line.
    self.lines = collections.defaultdict(dict)
    self.numbers = itertools.count()

  def running(self) -> bool:
    return any(place.step < self.steps for place in self.places)

  def start_tasks(self):
    """Executes instructions until every place is busy or must wait."""
    moved = True
    while moved:
      moved = False
      for place in self.places:
        while (
          not place.task and place.step < self.steps and self.execute(place)
        ):
          moved = True
    running = {
      p.name: p.task for p in self.places if p.task and p.task.what == 'run'
    }
    if running != self.tasks:
      self.tasks = running
      self.apply_contention()

  def apply_contention(self):
    """Slows down calls that run at the same time and share a processor."""
    for place in self.places:
      if task := self.tasks.get(place.name):
        beside = tuple(name for name in self.tasks if name != place.name)
        node = place.frame.flow.nodes[task.node]
        slowdown = self.cost.contention(node, place.name, beside)
        if slowdown != task.slowdown:
          task.change(self.now, slowdown)

  def advance(self):
    """Advances time to the end of the next task."""
    tasks = [place.task for place in self.places if place.task]
    if not tasks and self.running():
      waits = {p.name: p.next for p in self.places if p.step < self.steps}
      raise RuntimeError(
        f'The programs wait for each other, at {waits}: this is a fault of '
        'lowering, not of the plan. Please report it.'
      )
    self.now = min((task.end for task in tasks), default=self.now)
    for place in self.places:
      task = place.task
      if task and task.end <= self.now:
        place.task = None
        if isinstance(place.next, Release) and task.what == 'offload':
          self.free(place)
        if task.what != 'wait':  # A wait ends when the value is received.
          self.record(place, task.what, task.node, task.value)

  def record(self, place: clock.Place, what, node=None, value=None):
    """Records a span that ends now, and moves to the next instruction."""
    self.spans.append(place.span(what, self.now, node, value))
    place.frame.at += 1

  def occupy(
    self, place: clock.Place, what, seconds, node=None, value=None
  ) -> bool:
    """Occupies a place for some seconds; returns True if they are none."""
    if seconds > 0:
      place.task = clock.Task(what, seconds, self.now, node, value)
      return False
    self.record(place, what, node, value)
    return True

  def begun(self, step: int) -> bool:
    """Whether the inputs of a step have arrived."""
    before = step - 1 - self.staleness
    return before < 0 or all(len(p.ends) > before for p in self.places)

  def arrival(self, place: clock.Place, v: int, source: str) -> float | None:
    """Returns when a value arrives; None if that is not known yet."""
    loop = place.frame.loop
    if source == SOURCE:
      return self.now if loop or self.begun(place.step) else None
    link = self.links[loop, v, source, place.name]
    return link[0] if link else None

  def execute(self, place: clock.Place) -> bool:
    """Executes one instruction; returns False if its place is now busy."""
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
        self.start_background(place, i)
      case Run(i) if (frame.loop, i) in place.begun:
        return self.await_end(place, i)
      case Run(i, _, streamed):
        seconds = cost.seconds(flow, flow.nodes[i], place.name)
        seconds += sum(
          cost.switch(flow, v, place.name) for pair in streamed for v in pair
        )
        return self.occupy(place, 'run', seconds, node=i)
      case Send(v, target) if target != SINK:
        lasts = cost.transfer(flow, v, place.name, target)
        if target in self.sharing and v in frame.there:
          lasts += cost.switch(
            flow, v, place.name
          )  # It is received in host memory.
        link = self.links[frame.loop, v, place.name, target]
        link.append(self.now + lasts)
      case Recv(v, source):
        return self.receive(place, v, source)
      case Acquire(devices, rank, values):
        return self.acquire(place, devices, rank, values)
      case Release(v, source):
        return self.release(place, v, source)
      case (Offload(v) | Restore(v)) as op:
        what = 'offload' if isinstance(op, Offload) else 'restore'
        seconds = cost.switch(flow, v, place.name)
        return self.occupy(place, what, seconds, value=v)
    frame.at += 1
    return True

  def start_background(self, place: clock.Place, i: int):
    """Queues an asynchronous call behind the earlier calls of its stage."""
    flow, loop = place.frame.flow, place.frame.loop
    seconds = self.cost.seconds(flow, flow.nodes[i], place.name)
    name = background(place.name, flow.nodes[i].name)
    start = max(self.now, place.free[name])
    end = place.free[name] = place.begun[loop, i] = start + seconds
    if seconds > 0:
      self.spans.append(
        clock.Span(place.step, name, 'run', i, None, start, end, loop)
      )

  def await_end(self, place: clock.Place, i: int) -> bool:
    """Takes the result of an asynchronous call; False if it must wait."""
    frame = place.frame
    if place.begun[frame.loop, i] > self.now:
      place.task = clock.Task('wait', 0.0, place.begun[frame.loop, i])
      return False
    del place.begun[frame.loop, i]
    if self.now > place.clock:
      self.record(place, 'wait', value=frame.flow.nodes[i].writes[0])
    else:
      frame.at += 1
    return True

  def receive(self, place: clock.Place, v: int, source: str) -> bool:
    """Receives a value; returns False if it has not arrived."""
    arrives = self.arrival(place, v, source)
    if arrives is None:
      return False
    if arrives > self.now:
      place.task = clock.Task('wait', 0.0, arrives)
      return False
    if source != SOURCE:
      self.links[place.frame.loop, v, source, place.name].popleft()
    if self.now > place.clock:
      self.record(place, 'wait', value=v)
    else:
      place.frame.at += 1
    return True

  def acquire(self, place: clock.Place, devices, rank: int, values) -> bool:
    """Acquires shared devices; returns False while the place must wait."""
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

  def release(self, place: clock.Place, v: int | None, source: str) -> bool:
    """Releases shared devices, unless the next value has arrived.

    An engine computes on them, so a place waits for the calls that it has
    begun.
    """
    if v is not None:
      arrives = self.arrival(place, v, source)
      if arrives is not None and arrives <= self.now:
        place.frame.at += 1
        return True
    ends = place.engine_end()
    if ends > self.now:
      place.task = clock.Task('wait', 0.0, ends)
      return False
    held = []
    for frame in place.frames:
      held += [(frame.flow, v) for v in (*frame.there, *frame.kept)]
      frame.there, frame.kept, frame.given = set(), set(), set()
    return self.switch(place, 'offload', held)

  def switch(self, place: clock.Place, what: str, moved) -> bool:
    """Moves values between device and host memory, which takes time."""
    seconds = sum(self.cost.switch(flow, v, place.name) for flow, v in moved)
    if seconds > 0:
      place.task = clock.Task(what, seconds, self.now)
      return False
    if what == 'offload':
      self.free(place)
    place.frame.at += 1
    return True

  def free(self, place: clock.Place):
    """Makes the shared devices of a place available to others."""
    self.taken.discard(place.has)
    place.has = None
