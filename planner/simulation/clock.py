"""The simulated state of a place: its clock and its position in a program."""

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
  """An interval of a place's simulated time.

  Attributes:
    step: index of the step, from zero.
    place: name of the place; `simulate.background` of it for calls that were
      started asynchronously.
    what: 'run', 'wait', 'offload' or 'restore'.
    node: index of the node that ran; None otherwise.
    value: index of the value that was waited for or moved; None for a run, and
      for waiting for, acquiring and releasing shared devices.
    start: seconds since the start of the simulation.
    end: likewise.
    loop: the enclosing loops, the outermost first: indices of their nodes, each
      in the body of the one before. `node` and `value` are indices in the
      innermost body.
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
class SimulatedFrame:
  """The execution of a program: of a step, or of a loop's body.

  Attributes:
    flow: the flow that the program is lowered from.
    program: the instructions of one round.
    rounds: rounds left, including the current one.
    loop: as `Span.loop`.
    at: index of the next instruction.
    there: values in device memory, where devices are shared.
    kept: values of the next round or step that are in device memory.
    given: inputs of a loop's body that are in device memory and belong to the
      enclosing program.
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
    """Updates the values in device memory after an instruction."""
    match op:
      case Run(i, donate, streamed):
        self.there.update(self.flow.nodes[i].writes)
        self.there.difference_update(donate, (v for _, v in streamed))
      case Drop(v) | Offload(v):
        self.there.discard(v)
      case Keep(end, start) if end in self.there:
        self.kept.add(start)
      case Recv(v, _) if v in self.given:
        self.there.add(v)


@dataclasses.dataclass(eq=False)
class Task:
  """A task that occupies a place until it ends.

  Attributes:
    what: as `Span.what`.
    left: seconds that were left at `since`, without any slowdown.
    since: the time of the last update.
    node: index of the node that runs; None otherwise.
    value: index of the value that is moved; None for a run.
    slowdown: how many times as long the remaining seconds take.
  """

  what: str
  left: float
  since: float
  node: int | None = None
  value: int | None = None
  slowdown: float = 1.0

  @property
  def end(self) -> float:
    return self.since + self.left * self.slowdown

  def change(self, now: float, slowdown: float):
    """Changes the slowdown of the remaining seconds."""
    self.left -= (now - self.since) / self.slowdown
    self.since, self.slowdown = now, slowdown


class Place:
  """A place that executes its program."""

  def __init__(self, name: str, flow: graph.Flow, program):
    self.name = name
    self.clock, self.step = 0.0, 0
    self.frames = [SimulatedFrame(flow, program)]
    self.ends = []
    self.task: Task | None = None
    self.begun = {}  # When asynchronous calls will have ended.
    self.free = collections.defaultdict(float)  # When workers are idle.
    self.shares = any(isinstance(op, Acquire | Release) for op in program)
    self.has: tuple[int, ...] | None = None  # Acquired shared devices.

  @property
  def frame(self) -> SimulatedFrame:
    return self.frames[-1]

  @property
  def next(self):
    """The next instruction; None at the end of the program."""
    frame = self.frame
    return frame.program[frame.at] if frame.at < len(frame.program) else None

  def engine_end(self) -> float:
    """Returns when the calls of inference engines that have begun will end."""
    flows = {frame.loop: frame.flow for frame in self.frames}
    return max(
      (
        end
        for (loop, i), end in self.begun.items()
        if flows[loop].nodes[i].stage.engine is not None
      ),
      default=0.0,
    )

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
    """Returns the span since the clock, and advances the clock."""
    start, self.clock = self.clock, end
    loop = self.frame.loop
    return Span(self.step, self.name, what, node, value, start, end, loop)


def inner(frame: SimulatedFrame, op: Repeat) -> SimulatedFrame:
  """Starts the loop of a `Repeat`; returns its frame."""
  node = frame.flow.nodes[op.node]
  inner = SimulatedFrame(
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
