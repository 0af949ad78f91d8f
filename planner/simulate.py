"""Interprets programs with clocks: how long would a step take?"""

import collections
import dataclasses
import itertools
from typing import NamedTuple

from planner import graph
from planner.program import (
  Acquire,
  Drop,
  Evict,
  Keep,
  Recv,
  Release,
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
    value: which value was waited for or moved; None for a run, and where
      shared devices were waited for, taken or let go.
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
    there: values in the memory of devices, where these are shared.
    kept: values of the next round, or step, that are.
    given: inputs of a loop's body that are, and belong to what is around it.
    ends: as `Repeat.carry`.
  """

  flow: graph.Flow
  program: tuple
  rounds: int = 1
  loop: tuple[int, ...] = ()
  at: int = 0
  there: set[int] = dataclasses.field(default_factory=set)
  kept: set[int] = dataclasses.field(default_factory=set)
  given: set[int] = dataclasses.field(default_factory=set)
  ends: tuple[tuple[int, int, int], ...] = ()

  def follow(self, op):
    """Keeps account of what is on devices after an instruction."""
    match op:
      case Run(i, donate):
        self.there.update(self.flow.nodes[i].writes)
        self.there.difference_update(donate)
      case Drop(v) | Evict(v):
        self.there.discard(v)
      case Keep(end, start) if end in self.there:
        self.kept.add(start)
      case Recv(v, _) if v in self.given:
        self.there.add(v)


@dataclasses.dataclass(eq=False)
class _Task:
  """What keeps a place, and until when.

  Attributes:
    what: as of `Span`.
    left: seconds of it that were left at `since`, if nothing slows it down.
    since: when that was.
    node: which node runs; None for the rest.
    value: which value is moved; None for a run.
    slow: how many times as long as those seconds it takes from then on.
  """

  what: str
  left: float
  since: float
  node: int | None = None
  value: int | None = None
  slow: float = 1.0

  @property
  def end(self) -> float:
    return self.since + self.left * self.slow

  def change(self, now: float, slow: float):
    """From now on it takes so many times as long."""
    self.left -= (now - self.since) / self.slow
    self.since, self.slow = now, slow


class _Place:
  """Where a place is: in its program, and in which loops of it."""

  def __init__(self, name: str, flow: graph.Flow, program):
    self.name = name
    self.clock, self.step = 0.0, 0
    self.frames = [_Frame(flow, program)]
    self.ends = []
    self.task: _Task | None = None
    self.shares = any(isinstance(op, Acquire | Release) for op in program)
    self.has: tuple[int, ...] | None = None  # Shared devices, in its turn.

  @property
  def frame(self) -> _Frame:
    return self.frames[-1]

  @property
  def next(self):
    """The instruction that it is at."""
    frame = self.frame
    return frame.program[frame.at] if frame.at < len(frame.program) else None

  def round(self):
    """Ends a round of the innermost program, or a step."""
    frame = self.frame
    frame.at, frame.rounds = 0, frame.rounds - 1
    frame.there, frame.kept = frame.there | frame.kept, set()
    if len(self.frames) == 1:
      self.ends.append(self.clock)
      self.step, frame.rounds = self.step + 1, 1
    elif not frame.rounds:
      self.frames.pop()
      self.frame.there.update(
        end for _, start, end in frame.ends if start in frame.there
      )

  def span(self, what, end, node=None, value=None) -> Span:
    """What it has done since its clock, which goes on."""
    start, self.clock = self.clock, end
    loop = self.frame.loop
    return Span(self.step, self.name, what, node, value, start, end, loop)


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

  def __init__(self, cost, places: list[_Place], ahead: int, steps: int):
    self.cost, self.places = cost, places
    self.ahead, self.steps, self.now = ahead, steps, 0.0
    self.sharing = {place.name for place in places if place.shares}
    self.links = collections.defaultdict(collections.deque)
    self.spans: list[Span] = []
    self.running: dict[str, _Task] = {}
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

  def note(self, place: _Place, what, node=None, value=None):
    """Something has ended now, and its place goes on."""
    self.spans.append(place.span(what, self.now, node, value))
    place.frame.at += 1

  def keep(self, place: _Place, what, seconds, node=None, value=None) -> bool:
    """Keeps a place for some seconds; for none, it goes on at once."""
    if seconds > 0:
      place.task = _Task(what, seconds, self.now, node, value)
      return False
    self.note(place, what, node, value)
    return True

  def begun(self, step: int) -> bool:
    """Whether the inputs of a step are there."""
    before = step - 1 - self.ahead
    return before < 0 or all(len(p.ends) > before for p in self.places)

  def arrival(self, place: _Place, v: int, source: str) -> float | None:
    """When a value is there; None if that is not known yet."""
    loop = place.frame.loop
    if source == SOURCE:
      return self.now if loop or self.begun(place.step) else None
    link = self.links[loop, v, source, place.name]
    return link[0] if link else None

  def go_on(self, place: _Place) -> bool:
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
        place.frames.append(_inner(frame, op))
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
      case (Evict(v) | Restore(v)) as op:
        what = 'evict' if isinstance(op, Evict) else 'restore'
        seconds = cost.switch(flow, v, place.name)
        return self.keep(place, what, seconds, value=v)
    frame.at += 1
    return True

  def receive(self, place: _Place, v: int, source: str) -> bool:
    """Takes a value, or waits for it; False if it is not there."""
    arrives = self.arrival(place, v, source)
    if arrives is None:
      return False
    if arrives > self.now:
      place.task = _Task('wait', 0.0, arrives)
      return False
    if source != SOURCE:
      self.links[place.frame.loop, v, source, place.name].popleft()
    if self.now > place.clock:
      self.note(place, 'wait', value=v)
    else:
      place.frame.at += 1
    return True

  def take(self, place: _Place, devices, rank: int, values) -> bool:
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

  def let_go(self, place: _Place, v: int | None, source: str) -> bool:
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
    return self.switch(place, 'evict', held)

  def switch(self, place: _Place, what: str, moved) -> bool:
    """Moves values between devices and host, which keeps a place."""
    seconds = sum(self.cost.switch(flow, v, place.name) for flow, v in moved)
    if seconds > 0:
      place.task = _Task(what, seconds, self.now)
      return False
    if what == 'evict':
      self.free(place)
    place.frame.at += 1
    return True

  def free(self, place: _Place):
    """Others may have the devices that it shares."""
    self.taken.discard(place.has)
    place.has = None


def _inner(frame: _Frame, op: Repeat) -> _Frame:
  """A loop that a program comes to."""
  node = frame.flow.nodes[op.node]
  inner = _Frame(
    node.body,
    op.program,
    graph.rounds(node),
    (*frame.loop, op.node),
    there={start for v, start, _ in op.carry if v in frame.there},
    given={x for v, x in op.given if v in frame.there},
    ends=op.carry,
  )
  frame.there.difference_update(op.donate)
  return inner
