"""Lowered loops, run by an interpreter that models overwriting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.ir import flow as flow_lib
from planner.lower import passes, unroll
from planner.lower import program as program_lib
from tests.planner import loops
from tests.planner.lower import cut_test
import toys

TOLERANCE = {'rtol': 1e-9, 'atol': 1e-9}  # In float64: sines enlarge rounding.


pytestmark = pytest.mark.usefixtures('in_float64')


@dataclasses.dataclass(eq=False)
class Buffer:
  """Memory, and whether a stage has overwritten it."""

  x: object
  overwritten: bool = False


@dataclasses.dataclass(eq=False)
class Frame:
  """A program that a place executes: of a flow, or of a loop's body."""

  flow: object
  program: tuple
  memory: dict
  inputs: dict
  loop: tuple = ()
  rounds: int = 1
  op: object = None
  at: int = 0
  carry: dict = dataclasses.field(default_factory=dict)
  is_last: bool = False


class ModelPlace:
  """A place that asserts what a runtime relies on."""

  def __init__(self, name, frame, channels, sink):
    self.name, self.frames = name, [frame]
    self.channels, self.sink = channels, sink

  def advance(self) -> bool:
    """Executes an instruction; False if it must wait, or has ended."""
    frame = self.frames[-1]
    if frame.at == len(frame.program):
      return self.end_round(frame)
    memory, op = frame.memory, frame.program[frame.at]
    match op:
      case program_lib.Run(i, donate):
        self.run(frame, frame.flow.nodes[i], donate)
      case program_lib.Send(v, target) if target == program_lib.SINK:
        self.sink[v] = memory[v]
      case program_lib.Send(v, target):
        assert not memory[v].overwritten
        queue = self.channels.setdefault((frame.loop, v, self.name, target), [])
        queue.append(Buffer(memory[v].x))
      case program_lib.Recv(v, source):
        assert v not in memory
        queue = self.channels.get((frame.loop, v, source, self.name), [])
        if source != program_lib.SOURCE and not queue:
          return False
        memory[v] = frame.inputs[v] if not queue else queue.pop(0)
      case program_lib.Keep(end, start):
        frame.carry[start] = memory[end]
      case program_lib.Drop(v):
        del memory[v]
      case program_lib.Until(v):
        assert not memory[v].overwritten
        frame.is_last = bool(memory[v].x)
      case program_lib.Repeat():
        self.enter(frame, op)
    frame.at += 1
    return True

  def run(self, frame, node, donate):
    buffers = [frame.memory[v] for v in node.reads]
    assert not any(buffer.overwritten for buffer in buffers)
    args = [buffer.x for buffer in buffers]
    if node.in_tree is not None:
      args = jax.tree.unflatten(node.in_tree, args)
    outputs = jax.tree.leaves(node.stage.fn(*args))
    for v in donate:
      frame.memory.pop(v).overwritten = True
    for v, x in zip(node.writes, outputs, strict=True):
      assert v not in frame.memory
      frame.memory[v] = Buffer(x)

  def enter(self, frame, op):
    node, memory = frame.flow.nodes[op.node], frame.memory
    assert not any(memory[v].overwritten for v in op.reads)
    initial = {
      start: memory[v] if v in op.donate else Buffer(memory[v].x)
      for v, start, _ in op.carry
    }
    given = {x: memory[v] for v, x in op.given}
    loop, rounds = (*frame.loop, op.node), node.stage.at_most
    for v in op.donate:
      del memory[v]
    self.frames.append(
      Frame(node.body, op.program, initial, given, loop, rounds, op)
    )

  def end_round(self, frame) -> bool:
    left = set(frame.memory)
    stays = {start for start, end in frame.flow.carry if start == end}
    assert left <= stays, 'A round drops all that is not carried unchanged.'
    frame.memory |= frame.carry
    frame.at, frame.carry, frame.rounds = 0, {}, frame.rounds - 1
    if len(self.frames) == 1:
      frame.at = len(frame.program)
      return False
    if not frame.rounds or frame.is_last:
      self.frames.pop()
      for _, start, end in frame.op.carry:
        assert not frame.memory[start].overwritten
        self.frames[-1].memory[end] = frame.memory[start]
    return True

  @property
  def ended(self):
    return len(self.frames) == 1 and self.frames[0].rounds < 1


def play(flow, programs, memories, inputs):
  channels, sink = {}, {}
  places = [
    ModelPlace(
      name, Frame(flow, instructions, memories[name], inputs), channels, sink
    )
    for name, instructions in programs.items()
  ]
  while not all(place.ended for place in places):
    moved = False
    for place in places:
      while not place.ended and (place.advance() or place.ended):
        moved = True
    assert moved, 'Deadlock.'
  assert not any(channels.values()), 'Every sent value is received.'
  return sink, {place.name: place.frames[0].memory for place in places}


@pytest.mark.parametrize('seed', range(40))
def test_lowered_programs_with_loops_compute_what_their_flow_does(seed):
  fn, flow, plan, state, batch = loops.random_case(seed)
  resident = program_lib.homes(flow, plan)
  if seed % 2:  # In any order that a plan may give.
    plan = passes.with_order(flow, plan, toys.Random(seed))
  flow, programs = passes.lower(flow, plan, resident=resident)
  starts = [start for start, _ in flow.carry]
  memories = {
    name: {
      v: Buffer(x)
      for v, x in zip(starts, state, strict=True)
      if name in resident[v]
    }
    for name in plan.places
  }
  given = []
  with jax.disable_jit():
    for most in (2, 1, 3):
      most = jnp.int32(most)
      state, want = fn(state, batch, most)
      leaves = jax.tree.leaves((batch, most))
      lent = dict(zip(flow.inputs, map(Buffer, leaves), strict=True))
      sink, memories = play(flow, programs, memories, lent)
      for v, x in zip(starts, state, strict=True):
        for name in resident[v]:
          np.testing.assert_allclose(memories[name][v].x, x, **TOLERANCE)
      for v, x in zip(flow.outputs, want, strict=True):
        np.testing.assert_allclose(sink[v].x, x, **TOLERANCE)
      given += [*lent.values(), *sink.values()]
  assert not any(buffer.overwritten for buffer in given)


@pytest.mark.parametrize('seed', range(20))
def test_an_unrolled_flow_computes_what_static_loops_do(seed):

  rng = np.random.default_rng(seed)
  state, batch = (
    loops.random_rows(rng, rng.integers(1, 4)),
    loops.random_rows(rng, rng.integers(1, 3)),
  )
  fn = loops.random_loop(seed, depth=1 + seed % 2)
  most = jnp.int32(9)  # More rounds than any loop has.
  flow = unroll.unroll(flow_lib.trace(fn, state, batch, most))
  assert not any(node.body for node in flow.nodes)
  with jax.disable_jit():
    got = cut_test.play(flow, state, (batch, most))
    want = fn(state, batch, most)
  for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)
