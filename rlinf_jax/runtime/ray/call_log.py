"""The driver's record of calls, and of how far each process is with them."""

import collections
from collections.abc import Mapping
from typing import Any

import jax
import ray

from planner.lower import recovery
from rlinf_jax.runtime.ray import pending
from rlinf_jax.runtime.ray.transport import serialize
from rlinf_jax.state import state_readers


class CallLog:
  """Calls since a state was loaded. The driver's lock guards it.

  Attributes:
    generation: how often a state was loaded.
    first_step: number of the first step since then.
    state: reads the state that was loaded.
    pending: calls that some process has not finished, oldest first.
    finished: how many calls each place has finished for sure.
    sent: how many values each process has sent, by channel within a loop.
    replaced: by place, the number of the call that its replacement began with.
  """

  def __init__(self):
    """Starts without a state."""
    self._counts = collections.Counter()  # Calls of each flow.
    self.generation = -1
    self.reset(None, steps=0)

  def reset(self, state: state_readers.StateReader | None, steps: int):
    """Starts a generation.

    Args:
      state: reads the state that is loaded.
      steps: number of steps that led to it.
    """
    self.generation += 1
    self.state, self.first_step = state, steps + 1
    self._counts.clear()
    self.pending: list[pending.PendingCall] = []
    self.finished: dict[str, int] = {}
    self.sent: dict[str, Mapping] = {}
    self.replaced: dict[str, int] = {}

  def new_call(self, flow: str, step: int, inputs=()) -> pending.PendingCall:
    """The next call; `add` makes it pending."""
    leaves = ray.put([serialize.pack(x) for x in jax.tree.leaves(inputs)])
    number = self._counts.total()
    return pending.PendingCall(flow, step, leaves, number, self._counts[flow])

  def add(self, call: pending.PendingCall):
    """Appends a call to those that are pending."""
    self._counts[call.flow] += 1
    self.pending.append(call)

  def send(
    self,
    call: pending.PendingCall,
    process: str,
    actor: Any,
    remaining: recovery.Left = recovery.EVERYTHING,
  ):
    """Has a process execute its part of a call, without blocking."""
    reference = actor.call.remote(
      call.flow,
      call.step,
      call.inputs,
      call.number,
      call.flow_call,
      dict(self.finished),
      remaining,
    )
    call.processes[reference] = process

  def finish(self, call: pending.PendingCall, process: str, place: str, sent):
    """Records that a process has finished a call.

    Args:
      call: which.
      process: which.
      place: that it belongs to.
      sent: how many values it has sent, by channel within a loop.
    """
    # Answers may be read out of order: an older one says nothing new.
    if call.number >= self.finished.get(place, 0):
      self.sent[process], self.finished[place] = sent, call.number + 1
