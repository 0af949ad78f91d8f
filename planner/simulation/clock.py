"""A place and its clock: where it is in its program, and what it has done."""

import collections
import dataclasses
from typing import NamedTuple

from planner.ir import graph
from planner.lower.program import (
  Acquire,
  Drop,
  Keep,
  Offload,
  Recv,
  Release,
  Repeat,
  Run,
)


class Span(NamedTuple):
  """Something that a place did.

  Attributes:
    step: in which step, from zero.
    place: where; for what was begun ahead of its turn, `outside` of that.
    what: 'run', 'wait', 'offload' or 'restore'.
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


@dataclasses.dataclass
class Frame:
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
      case Drop(v) | Offload(v):
        self.there.discard(v)
      case Keep(end, start) if end in self.there:
        self.kept.add(start)
      case Recv(v, _) if v in self.given:
        self.there.add(v)


@dataclasses.dataclass(eq=False)
class Task:
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


class Place:
  """Where a place is: in its program, and in which loops of it."""

  def __init__(self, name: str, flow: graph.Flow, program):
    self.name = name
    self.clock, self.step = 0.0, 0
    self.frames = [Frame(flow, program)]
    self.ends = []
    self.task: Task | None = None
    self.begun = {}  # When calls that were begun will have ended.
    self.free = collections.defaultdict(float)  # Who does that, from when on.
    self.shares = any(isinstance(op, Acquire | Release) for op in program)
    self.has: tuple[int, ...] | None = None  # Shared devices, in its turn.

  @property
  def frame(self) -> Frame:
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


def inner(frame: Frame, op: Repeat) -> Frame:
  """A loop that a program comes to."""
  node = frame.flow.nodes[op.node]
  inner = Frame(
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
