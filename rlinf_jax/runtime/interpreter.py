"""The thread of a place, which interprets its programs."""

from collections.abc import Iterable
from concurrent import futures
import contextlib
from typing import Any
import weakref

import jax
import jax.numpy as jnp

from planner.ir import graph as graph_lib
from planner.lower import program as program_lib
from planner.lower import recovery
from rlinf_jax.runtime import base
from rlinf_jax.runtime.places import lease as lease_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.step_call import StackFrame, StepCall
from sharding import multihost, offload

SHARED = 'shared devices'  # The name of a lease's spans in the timeline.
MORE_MEMORY = (
  ' It needs more memory than it gets: cut its rows (`micro_batch` of the '
  'plan), make the batch or its lengths smaller, or end other programs that '
  'hold memory of the device.'
)
_copy = jax.jit(lambda xs: [jnp.copy(x) for x in xs])


class Interpreter:
  """Executes the programs of one place on a thread of its own.

  The thread owns the place's memory: the carried state between calls, and the
  stack frames during one. Other threads read `state` only after `wait`. Within
  a call, instructions run in program order. Three wait for other places: `Recv`
  for a value, `Acquire` for shared devices, and what overwrites an array for
  its readers in other processes. `Send` never waits for its receiver.

  A failure of an instruction stops this call and, through the executor, all
  others. The place then frees its memory, and releases the devices that it
  shares.

  Attributes:
    place: the devices.
    state: the carried values that live here, by number in the carry.
  """

  def __init__(self, executor, place: place_lib.Place):
    # Weak, so that a dropped executor is freed, and its threads with it.
    self.executor, self.place = weakref.proxy(executor), place
    self.state: dict[int, Any] = {}
    self._thread = futures.ThreadPoolExecutor(
      1, place.name, lease_lib.set_current, (place.lease,)
    )
    self._last = None
    self._frames: list[StackFrame] = []  # The stack, outermost first.

  def submit(self, call: StepCall):
    """Queues a call behind those that were submitted before it."""
    self._last = self._thread.submit(self._run_guarded, call)

  def wait(self):
    """Blocks until all submitted calls have ended, or failed."""
    if self._last:
      self._last.result()

  def close(self):
    """Ends the thread after the calls that are queued; frees all arrays."""
    self._thread.shutdown()
    self._frames, self.state = [], {}

  def _run_guarded(self, call: StepCall):
    try:
      self._run_call(call)
    except BaseException as error:  # noqa: BLE001 (receivers must be woken)
      self.executor.fail(error, call)
      self._free_all()

  def _run_call(self, call: StepCall):
    """Executes this place's program for one call of a flow."""
    lowered = self.executor.lowered[call.flow]
    flow, program = lowered.flow, lowered.programs[self.place.name]
    frame = StackFrame(call, flow, {}, call.inputs)
    self._frames = [frame]
    carried = [*self._carried(flow)]
    # The frame alone refers to the state, so that a `Drop` frees it.
    held, self.state = self.state, {}
    for i, v, in_steps, value in carried:
      frame.memory[v] = self._relabel(in_steps, value, held.pop(i))
    self._run_program(frame, program)
    for i, v, in_steps, value in carried:
      self.state[i] = self._relabel(value, in_steps, frame.memory.pop(v))
    self._frames = []

  def _carried(self, flow: graph_lib.Flow):
    """Yields the carried values that this place holds.

    An evaluation may read without rows what steps shard by rows, or as rows
    what they do not.

    Args:
      flow: of a call.

    Yields:
      The number of the value in the carry, its id in the flow, the value as
      steps lay it out, and as the flow reads it.
    """
    step = self.executor.lowered['step'].flow
    for i in self.state:
      start, _ = flow.carry[i]
      in_steps = step.values[step.carry[i][0]]
      is_read = start in flow.readers
      yield i, start, in_steps, flow.values[start] if is_read else in_steps

  def _run_program(self, frame: StackFrame, program):
    """Executes a program from its beginning to its end."""
    try:
      for op in program:
        if self.executor.failure:
          raise self.executor.failure
        if not _is_done(frame, op):
          self._interpret(frame, op)
    finally:  # After a failure nothing waits for asynchronous calls.
      for started in frame.started.values():
        started.cancel()
    frame.memory |= frame.carry
    frame.carry = {}

  def _run_loop(self, frame: StackFrame, op: program_lib.Repeat):
    """Executes a loop until its condition, or its limit, ends it."""
    memory, node = frame.memory, frame.flow.nodes[op.node]
    outer, values = frame.flow.values, node.body.values
    initial = {
      start: self._relabel(outer[v], values[start], memory[v])
      for v, start, _ in op.carry
    }
    # Rounds overwrite what they carry. Copy what the outer program still needs;
    # arrays in host memory are never overwritten.
    needed = [start for v, start, _ in op.carry if v not in op.donate]
    needed = [
      start for start in needed if not offload.is_offloaded(initial[start])
    ]
    initial |= _zip(needed, _copy([initial[start] for start in needed]))
    inputs = {
      x: self._relabel(outer[v], values[x], memory[v]) for v, x in op.given
    }
    loop = (*frame.loop, op.node)
    inner = StackFrame(frame.call, node.body, initial, inputs, loop)
    self.executor.wait_until_read([memory[v] for v in op.donate])
    for v in op.donate:
      del memory[v]
    self._frames.append(inner)
    for i in range(node.stage.at_most):
      inner.round = f'{frame.round}, round {i + 1} of {node.name}'
      self._run_program(inner, op.program)
      if inner.is_last:
        break
    self._frames.pop()
    for _, start, end in op.carry:
      memory[end] = self._relabel(values[start], outer[end], initial[start])

  def _interpret(self, frame: StackFrame, op):
    """Executes one instruction."""
    flow, memory, here = frame.flow, frame.memory, self.place.name
    start = self.executor.timeline.now()
    match op:
      case program_lib.Begin(i):
        self._start(frame, i)
      case program_lib.Run():
        self._run_stage(frame, op)
      case program_lib.Send(v, target) if target == program_lib.SINK:
        x = self._unleased(memory[v])
        self.executor.put_output(frame.call, v, x)
      case program_lib.Send(v, target):
        self.executor.send(frame, v, here, target, memory[v])
        self._record(frame, 'send', flow.values[v].name, start)
      case program_lib.Recv(v, source) if source == program_lib.SOURCE:
        x = frame.inputs[v]
        memory[v] = x if frame.loop else self.place.store(flow.values[v], x)
      case program_lib.Recv(v, source):
        x = self.executor.receive(frame, v, source, here)
        memory[v] = jax.block_until_ready(x)
        self._record(frame, 'wait', flow.values[v].name, start)
      case program_lib.Repeat():
        self._run_loop(frame, op)
      case program_lib.Until(v):
        frame.is_last = bool(memory[v])
      case program_lib.Keep(end, v):
        x = self._relabel(flow.values[end], flow.values[v], memory[end])
        frame.carry[v] = x
      case program_lib.Drop(v):
        del memory[v]
      case program_lib.Offload(v):
        (memory[v],) = offload.to_host([memory[v]])
        self._record(frame, 'offload', flow.values[v].name, start)
      case program_lib.Restore(v):
        (memory[v],) = offload.to_device([memory[v]])
        self._record(frame, 'restore', flow.values[v].name, start)
      case program_lib.Acquire(_, _, values):
        self._acquire(frame, values)
      case program_lib.Release(v, source):
        if v is None or not self.executor.has_arrived(frame, v, source, here):
          self._release(frame)

  def _record(self, frame: StackFrame, what: str, name: str, start, **kwargs):
    """Adds a span that ends now to the timeline."""
    self.executor.timeline.add(
      frame.call.step, self.place.name, what, name, start, **kwargs
    )

  # Calls of stages.

  def _start(self, frame: StackFrame, i: int):
    """Starts an asynchronous call, whose `Run` waits for its result."""
    node = frame.flow.nodes[i]
    with self._explained(frame, node):
      leaves = (frame.memory[v] for v in node.reads)
      frame.started[i] = self.executor.compiled(frame, i).start(*leaves)

  def _run_stage(self, frame: StackFrame, op: program_lib.Run):
    """Calls a stage, or waits for its result if it was started before."""
    i, donate = op.node, op.donate
    node, memory = frame.flow.nodes[i], frame.memory
    start = self.executor.timeline.now()
    with self._explained(frame, node):
      self.executor.wait_until_read([memory[v] for v in donate])
      for v, _ in op.streamed:  # Another process may have sent it.
        (memory[v],) = offload.to_host([memory[v]])
      call = self.executor.compiled(frame, i)
      leaves = [memory[v] for v in node.reads]
      if i in frame.started:
        started = frame.started[i]
        results = call.finish(started, *leaves)
        del frame.started[i]
        self.executor.timeline.add_elsewhere(
          frame.call.step, node.name, node.piece, started.elsewhere
        )
      else:
        results = call(*leaves)
      # Block: seconds by stage are worth more than a dispatch ahead of time.
      jax.block_until_ready(results)
      memory.update(zip(node.writes, results, strict=True))
    self._record(frame, 'run', node.name, start, piece=node.piece)
    for v in donate:
      del memory[v]

  @contextlib.contextmanager
  def _explained(self, frame: StackFrame, node):
    """Turns exceptions into a StageError that names stage, place and step."""
    try:
      yield
    except Exception as error:
      piece, pieces = node.piece
      which = f', piece {piece + 1} of {pieces}' if pieces > 1 else ''
      remedy = MORE_MEMORY if _lacks_memory(error) else ''
      raise base.StageError(
        f'Stage {node.name} on place {self.place.name!r} failed in '
        f'{frame.where}{which}: {error}{remedy}'
      ) from error

  def _relabel(self, value: graph_lib.Value, other: graph_lib.Value, x):
    """`x`, laid out as `value`, in the layout of `other`."""
    if self.place.mesh is None or value.letters == other.letters:
      return x
    if offload.is_offloaded(x):
      layout = self.place.layout(other, is_hosted=True)
      return jax.block_until_ready(multihost.put(x, layout))
    return self.place.put(other, x)

  # Devices that places share.

  def _acquire(self, frame: StackFrame, values):
    """Waits for the shared devices, and restores values to their memory."""
    memory, lease = frame.memory, self.place.lease
    start = self.executor.timeline.now()
    if not lease.held:
      try:
        lease.acquire(
          self.executor.receive_timeout, lambda: self.executor.failure
        )
      except TimeoutError as error:
        raise base.StageError(f'In {frame.where}: {error}') from None
      self._record(frame, 'wait', SHARED, start)
    start = self.executor.timeline.now()
    offloaded = [
      v for v in values if v in memory and offload.is_offloaded(memory[v])
    ]
    if offloaded:
      memory |= _zip(
        offloaded, offload.to_device([memory[v] for v in offloaded])
      )
      self._record(frame, 'restore', SHARED, start)

  def _release(self, frame: StackFrame):
    """Offloads all arrays to host memory, and releases the devices."""
    lease = self.place.lease
    if not lease.held:
      return
    start = self.executor.timeline.now()
    for free in lease.on_release:
      free()
    memories = self._memories()
    # Move an array once, however many values it stands for.
    arrays = {id(x): x for memory in memories for x in memory.values()}
    moved = _zip(arrays, offload.to_host([*arrays.values()]))
    for memory in memories:
      memory |= {v: moved[id(x)] for v, x in memory.items()}
    del arrays  # The last references to the device memory.
    self._record(frame, 'offload', SHARED, start)
    lease.release()

  def _memories(self) -> list[dict[int, Any]]:
    """All arrays that this place holds during a call, by value.

    The inputs of the outermost frame belong to the caller.
    """
    own = [m for frame in self._frames for m in (frame.memory, frame.carry)]
    return own + [frame.inputs for frame in self._frames[1:]]

  def _free_all(self):
    """Frees all arrays and releases shared devices, after a failure.

    The state that is read next would otherwise need memory beside them.
    """
    lease = self.place.lease
    for free in lease.on_release if lease and lease.held else ():
      with contextlib.suppress(Exception):  # The failure is known already.
        free()
    for memory in self._memories():
      memory.clear()
    self._frames, self.state = [], {}
    if lease:
      lease.release()

  def _unleased(self, x):
    """`x`; in host memory if this place shares its devices."""
    return offload.to_host([x])[0] if self.place.lease else x


def _is_done(frame: StackFrame, op) -> bool:
  """Whether a process that this one replaces has executed an instruction."""
  remaining = frame.call.remaining
  if frame.loop or remaining is recovery.EVERYTHING:
    return False
  match op:
    case program_lib.Begin(i) | program_lib.Run(i):
      return i in remaining.skip
    case program_lib.Send(v, target):
      return (v, target) in remaining.sent
    case program_lib.Drop(v) | program_lib.Offload(v) | program_lib.Restore(v):
      return v not in frame.memory  # The call that made it was skipped.
  return False


def _zip(names: Iterable, xs: Iterable) -> dict:
  return dict(zip(names, xs, strict=True))


def _lacks_memory(error: Exception) -> bool:
  """Whether memory was refused, by Python or by XLA (absl's status code)."""
  return isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)
