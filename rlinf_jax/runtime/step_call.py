"""Calls of a flow in progress, and the stack of one place's interpreter."""

from concurrent import futures
import dataclasses
from typing import Any

from planner.ir import graph as graph_lib
from planner.lower import recovery
from rlinf_jax.runtime import base


@dataclasses.dataclass(eq=False)
class StepCall:
  """One call of a flow, shared by all places of a process.

  Attributes:
    flow: its name.
    step: number of the update, from one; an evaluation has that of the next.
    inputs: arrays, by value.
    outputs: arrays, by value, filled in as places send them.
    missing: output values that have not been sent yet.
    done: set to the outputs when none is missing, or to the first failure.
    remaining: what there is to do, if another process has done some of it.
  """

  flow: str
  step: int
  inputs: dict[int, Any]
  outputs: dict[int, Any]
  missing: set[int]
  done: futures.Future
  remaining: recovery.Left = recovery.EVERYTHING


@dataclasses.dataclass(eq=False)
class StackFrame:
  """A program that an interpreter executes: of a flow, or of a loop's body.

  Attributes:
    call: the call that it is part of.
    flow: the flow, or the body of the loop.
    memory: arrays that the place holds, by value.
    inputs: arrays that come from outside the program, by value.
    loop: node numbers of the enclosing loops, the outermost first.
    round: number of the innermost loop's round, in words; '' outside of loops.
    carry: what the next round, or the next step, begins with, by value.
    is_last: whether this round of the loop is the last.
    started: results of asynchronous calls in progress, by node.
  """

  call: StepCall
  flow: graph_lib.Flow
  memory: dict[int, Any]
  inputs: dict[int, Any]
  loop: tuple[int, ...] = ()
  round: str = ''
  carry: dict[int, Any] = dataclasses.field(default_factory=dict)
  is_last: bool = False
  started: dict[int, Any] = dataclasses.field(default_factory=dict)

  def channel(self, value: int, source: str, target: str) -> base.Channel:
    """The route of a value of this program."""
    return base.Channel(self.call.flow, self.loop, value, source, target)

  @property
  def where(self) -> str:
    """The step and the round, for messages."""
    return f'step {self.call.step}{self.round}'
