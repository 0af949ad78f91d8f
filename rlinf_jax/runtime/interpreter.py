"""A place's thread, which interprets its programs."""

from collections.abc import Iterable
from concurrent import futures
import contextlib
import dataclasses
from typing import Any
import weakref

import jax
import jax.numpy as jnp

from planner.ir import graph as graph_lib
from planner.lower import program as program_lib
from planner.lower import recovery
from rlinf_jax.runtime import base
from rlinf_jax.runtime import lease as lease_lib
from rlinf_jax.runtime import place as place_lib
from sharding import offload


@dataclasses.dataclass(eq=False)
class StepCall:
  """One call of a flow, on its way through the places.

  Attributes:
    name: of the flow.
    step: the update that it is, from one; an evaluation is before the next.
    inputs: by value.
    outputs: by value, as they come.
    missing: values that are still to come.
    done: set when all outputs are there, or at the first failure.
    left: what there is to do, where another process has done some of it.
  """

  name: str
  step: int
  inputs: dict[int, Any]
  outputs: dict[int, Any]
  missing: set[int]
  done: futures.Future
  left: recovery.Left = recovery.EVERYTHING


@dataclasses.dataclass(eq=False)
class StackFrame:
  """A program under way: of a turn, or of the body of a loop in it.

  Attributes:
    turn: which.
    flow: what the program is of.
    memory: by value.
    inputs: by value: what comes from the `SOURCE`.
    loop: numbers of the nodes of the loops that it is in, the outermost first.
    round: of the innermost, in words; nothing outside of loops.
    kept: what the next round, or step, begins with, by value.
    last: whether this round of a loop is the last.
    begun: calls that wait for their turn, by node.
  """

  turn: StepCall
  flow: graph_lib.Flow
  memory: dict[int, Any]
  inputs: dict[int, Any]
  loop: tuple[int, ...] = ()
  round: str = ''
  kept: dict[int, Any] = dataclasses.field(default_factory=dict)
  last: bool = False
  begun: dict[int, Any] = dataclasses.field(default_factory=dict)


def _is_done(frame: StackFrame, op) -> bool:
  """Whether an instruction need not be carried out again."""
  left = frame.turn.left
  if frame.loop or left is recovery.EVERYTHING:
    return False
  match op:
    case program_lib.Begin(i) | program_lib.Run(i):
      return i in left.skip
    case program_lib.Send(v, target):
      return (v, target) in left.sent
    case program_lib.Drop(v) | program_lib.Offload(v) | program_lib.Restore(v):
      return v not in frame.memory  # What made it was left out.
  return False


_copied = jax.jit(lambda xs: [jnp.copy(x) for x in xs])
SHARED = 'shared devices'


def _named(names: Iterable, xs: Iterable) -> dict:
  return dict(zip(names, xs, strict=True))


class Interpreter:
  """A place's thread, and what it holds from step to step.

  Attributes:
    place: where it works.
    state: what it holds, by number in the carry.
  """

  def __init__(self, runtime, place: place_lib.Place):
    # It must not keep alive what keeps it alive: its thread ends with them.
    self.runtime, self.place = weakref.proxy(runtime), place
    self.state: dict[int, Any] = {}
    self._thread = futures.ThreadPoolExecutor(
      1, place.name, lease_lib.set_current, (place.lease,)
    )
    self._last = None
    self._frames: list[StackFrame] = []  # Under way, the outermost first.

  def begin(self, turn: StepCall):
    """Takes a turn when those before it have been taken."""
    self._last = self._thread.submit(self._guarded, turn)

  def wait(self):
    """Returns when all turns have been taken."""
    if self._last:
      self._last.result()

  def close(self):
    """Ends the thread, after the turns that it was given."""
    self._thread.shutdown()

  def _guarded(self, turn: StepCall):
    try:
      self._take(turn)
    except BaseException as error:  # noqa: BLE001 (whoever waits must know)
      self.runtime.fail(error, turn)
      self._give_up()

  def _take(self, turn: StepCall):
    """One turn of this place's program."""
    lowered = self.runtime.lowered[turn.name]
    flow, program = lowered.flow, lowered.programs[self.place.name]
    starts = [start for start, _ in flow.carry]
    memory = {starts[i]: x for i, x in self.state.items()}
    frame = StackFrame(turn, flow, memory, turn.inputs)
    self._frames = [frame]
    self._play(frame, program)
    self.state = {i: memory[starts[i]] for i in self.state}
    self._frames = []

  def _play(self, frame: StackFrame, program):
    """A program from its beginning to its end."""
    try:
      for op in program:
        if self.runtime.failure:
          raise self.runtime.failure
        if not _is_done(frame, op):
          self._interpret(frame, op)
    finally:  # Where something failed, nobody waits for what was begun.
      for begun in frame.begun.values():
        begun.cancel()
    frame.memory |= frame.kept
    frame.kept = {}

  def _repeat(self, frame: StackFrame, op: program_lib.Repeat):
    """A loop, as often as it goes round."""
    memory, node = frame.memory, frame.flow.nodes[op.node]
    outer, values = frame.flow.values, node.body.values
    begin = {
      start: self._as(outer[v], values[start], memory[v])
      for v, start, _ in op.carry
    }
    # Rounds overwrite what they carry: what others hold too is copied, but in
    # host memory nothing is overwritten.
    lent = [start for v, start, _ in op.carry if v not in op.donate]
    lent = [start for start in lent if not offload.is_away(begin[start])]
    begin |= _named(lent, _copied([begin[start] for start in lent]))
    inner = StackFrame(
      frame.turn,
      node.body,
      begin,
      {x: self._as(outer[v], values[x], memory[v]) for v, x in op.given},
      (*frame.loop, op.node),
    )
    self.runtime.settle([memory[v] for v in op.donate])
    for v in op.donate:
      del memory[v]
    self._frames.append(inner)
    for i in range(node.stage.at_most):
      inner.round = f'{frame.round}, round {i + 1} of {node.name}'
      self._play(inner, op.program)
      if inner.last:
        break
    self._frames.pop()
    for _, start, end in op.carry:
      memory[end] = self._as(values[start], outer[end], begin[start])

  def _interpret(self, frame: StackFrame, op):
    turn, flow, memory = frame.turn, frame.flow, frame.memory
    here, line = self.place.name, self.runtime.timeline
    start = line.now()
    match op:
      case program_lib.Begin(i):
        node = flow.nodes[i]
        with self._told(frame, node):
          leaves = (memory[v] for v in node.reads)
          frame.begun[i] = self.runtime.call(frame, i).begin(*leaves)
      case program_lib.Run(i, donate):
        node = flow.nodes[i]
        with self._told(frame, node):
          self.runtime.settle([memory[v] for v in donate])
          self._run(frame, node, i)
        line.add(turn.step, here, 'run', node.name, start, node.piece)
        for v in donate:
          del memory[v]
      case program_lib.Send(v, target):
        if target == program_lib.SINK:
          self.runtime.give(turn, v, self._for_good(memory[v]))
        else:
          self.runtime.send(frame, v, here, target, memory[v])
          line.add(turn.step, here, 'send', flow.values[v].name, start)
      case program_lib.Recv(v, source) if source == program_lib.SOURCE:
        x = frame.inputs[v]
        memory[v] = x if frame.loop else self.place.store(flow.values[v], x)
      case program_lib.Recv(v, source):
        x = self.runtime.receive(frame, v, source, here)
        memory[v] = jax.block_until_ready(x)
        line.add(turn.step, here, 'wait', flow.values[v].name, start)
      case program_lib.Repeat():
        self._repeat(frame, op)
      case program_lib.Until(v):
        frame.last = bool(memory[v])
      case program_lib.Keep(end, v):
        frame.kept[v] = self._as(flow.values[end], flow.values[v], memory[end])
      case program_lib.Drop(v):
        del memory[v]
      case program_lib.Offload(v):
        (memory[v],) = offload.to_host([memory[v]])
        line.add(turn.step, here, 'offload', flow.values[v].name, start)
      case program_lib.Restore(v):
        (memory[v],) = offload.to_device([memory[v]])
        line.add(turn.step, here, 'restore', flow.values[v].name, start)
      case program_lib.Acquire(_, _, values):
        self._acquire(frame, values)
      case program_lib.Release(v, source):
        if v is None or not self.runtime.is_there(frame, v, source, here):
          self._let_go(turn)

  def _acquire(self, frame: StackFrame, values):
    """Has values in the memory of devices that this place shares."""
    turn, memory = frame.turn, frame.memory
    here, line = self.place.name, self.runtime.timeline
    start = line.now()
    if not self.place.lease.held:
      try:
        self.place.lease.acquire(
          self.runtime.receive_timeout, lambda: self.runtime.failure
        )
      except TimeoutError as error:
        raise base.StageError(
          f'In step {turn.step}{frame.round}: {error}'
        ) from None
      line.add(turn.step, here, 'wait', SHARED, start)
    start = line.now()
    away = [v for v in values if v in memory and offload.is_away(memory[v])]
    if away:
      memory |= _named(away, offload.to_device([memory[v] for v in away]))
      line.add(turn.step, here, 'restore', SHARED, start)

  def _let_go(self, turn: StepCall):
    """Moves all that is here to host memory, and lets its devices go."""
    if not self.place.lease.held:
      return
    start = self.runtime.timeline.now()
    for rest in self.place.lease.on_release:
      rest()
    memories = self._memories()
    # An array of several names stays one.
    there = {id(x): x for memory in memories for x in memory.values()}
    moved = _named(there, offload.to_host([*there.values()]))
    for memory in memories:
      memory |= {v: moved[id(x)] for v, x in memory.items()}
    del there
    self.runtime.timeline.add(
      turn.step, self.place.name, 'offload', SHARED, start
    )
    self.place.lease.release()

  def _memories(self) -> list[dict[int, Any]]:
    """All that it holds in the middle of a turn; inputs of that are lent."""
    found = [m for f in self._frames for m in (f.memory, f.kept)]
    return found + [frame.inputs for frame in self._frames[1:]]

  def _give_up(self):
    """Where something failed: others may have the devices at once."""
    if self.place.lease:
      for rest in self.place.lease.on_release if self.place.lease.held else ():
        with contextlib.suppress(Exception):  # What failed is told already.
          rest()
      for memory in self._memories():
        memory.clear()
      self.state = {}
      self.place.lease.release()

  def _for_good(self, x):
    """What leaves the programs: it must not keep memory that is shared."""
    return offload.to_host([x])[0] if self.place.lease else x

  def _as(self, value: graph_lib.Value, other: graph_lib.Value, x):
    """`x`, which is here as `value`, as this place holds `other`."""
    if self.place.mesh is None or value.letters == other.letters:
      return x
    if offload.is_away(x):
      return self.place.store(other, x)
    return self.place.put(other, x)

  def _run(self, frame: StackFrame, node, i):
    memory, call = frame.memory, self.runtime.call(frame, i)
    leaves = [memory[v] for v in node.reads]
    if i in frame.begun:
      begun = frame.begun[i]
      made = call.end(begun, *leaves)
      del frame.begun[i]
      self.runtime.timeline.elsewhere(
        *(frame.turn.step, node.name, node.piece, begun.elsewhere)
      )
    else:
      made = call(*leaves)
    # Seconds by stage are worth more than a dispatch ahead of the device.
    jax.block_until_ready(made)
    memory.update(zip(node.writes, made, strict=True))

  @contextlib.contextmanager
  def _told(self, frame: StackFrame, node):
    """Has a failure say of what it is."""
    try:
      yield
    except Exception as error:
      piece, pieces = node.piece
      which = f', piece {piece + 1} of {pieces}' if pieces > 1 else ''
      raise base.StageError(
        f'Stage {node.name} on place {self.place.name!r} failed in step '
        f'{frame.turn.step}{frame.round}{which}: {error}'
      ) from error
