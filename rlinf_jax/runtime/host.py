"""Places of a plan that run in this process, and what their threads ask for."""

from collections.abc import Mapping
from concurrent import futures
import threading
from typing import Any

import jax
import jax.numpy as jnp

from planner.ir import graph as graph_lib
from planner.lower import recovery
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime import interpreter as interpreter_lib
from rlinf_jax.runtime import mailbox as mailbox_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime.interpreter import StackFrame, StepCall


class Host:
  """Some places of a plan, a thread each, over devices of this process.

  Each place works through its program step by step and waits for nobody but
  those whose values it needs. What goes to a place of another process goes by
  `post`, which a host of all places does not need.

  Attributes:
    lowered: flows by name.
    places: by name.
    workers: their threads, by name.
    timeline: what ran when.
    mail: values on their way to these places.
    receive_timeout: seconds to wait for a value; None for ever.
  """

  def __init__(
    self,
    lowered: Mapping[str, programs.Lowered],
    places: Mapping[str, place_lib.Place],
    receive_timeout: float | None = None,
  ):
    """Refuses what the places cannot run; computes nothing."""
    self.lowered, self.places = dict(lowered), dict(places)
    self.receive_timeout = receive_timeout
    self.timeline = timeline_lib.Timeline()
    self.mail = mailbox_lib.Mailbox()
    self._calls, self._lock = {}, threading.Lock()
    self._check()
    self.interpreters = {
      name: interpreter_lib.Interpreter(self, place)
      for name, place in places.items()
    }

  def _check(self):
    for lowered in self.lowered.values():
      for name, place in self.places.items():
        program = lowered.programs[name]
        for _, flow, op, _ in programs.stage_calls(lowered.flow, program):
          node = flow.nodes[op.node]
          for v in (*node.reads, *node.writes):
            place.layout(flow.values[v])
          place.check_rows(flow, node)

  def load(self, leaves: Mapping[int, Any]):
    """Lays out carried values; copies, as steps overwrite them.

    A host in which something failed begins anew.

    Args:
      leaves: by number in the carry: at least those that live here.
    """
    for worker in self.interpreters.values():
      worker.wait()
    self.mail.clear()
    lowered = self.lowered['step']
    for name, worker in self.interpreters.items():
      here = [i for i, places in enumerate(lowered.resident) if name in places]
      laid = [
        worker.place.store(lowered.flow.values[lowered.flow.carry[i][0]], x)
        for i, x in ((i, leaves[i]) for i in here)
      ]
      if laid and not worker.place.lease:  # In host memory nothing overwrites.
        laid = jax.jit(lambda xs: [jnp.copy(x) for x in xs])(laid)
      worker.state = dict(zip(here, laid, strict=True))

  def leaves(self) -> dict[int, jax.Array]:
    """Carried values whose first home is here; a step overwrites them."""
    return {
      i: self.interpreters[first].state[i]
      for i, (first, *_) in enumerate(self.lowered['step'].resident)
      if first in self.interpreters
    }

  def wait(self):
    """Returns when every place has done all that it was asked to.

    Raises:
      StageError: if one of them failed.
    """
    for worker in self.interpreters.values():
      worker.wait()
    if self.failure:
      raise self.failure

  def close(self):
    """Ends the threads, each after the instruction that it is at."""
    self.fail(RuntimeError('The runtime was closed.'))
    for worker in self.interpreters.values():
      worker.close()

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name in self._calls:
      return
    lowered = self.lowered[name]
    pool = futures.ThreadPoolExecutor(2)
    calls = {}
    for place, made in self.places.items():
      for loop, flow, op, passed in programs.stage_calls(
        lowered.flow, lowered.programs[place]
      ):
        calls[loop, op.node] = pool.submit(
          made.compile, flow, flow.nodes[op.node], op.donate, passed
        )
    self._calls[name] = calls
    pool.shutdown(wait=False)

  def begin(
    self,
    name: str,
    step: int,
    leaves,
    left: recovery.Left = recovery.EVERYTHING,
  ) -> futures.Future:
    """Begins a flow; returns the future of the outputs that are made here.

    What is begun before the last has ended overlaps with it as far as its
    values allow.

    Args:
      name: of the flow.
      step: the update that it is.
      leaves: its inputs.
      left: what there is to do of it.
    """
    if self.failure:
      raise self.failure
    self.compile(name)
    lowered = self.lowered[name]
    turn = StepCall(
      name,
      step,
      dict(zip(lowered.flow.inputs, leaves, strict=True)),
      {},
      set().union(
        *(programs.outputs(lowered.programs[place]) for place in self.places)
      ),
      futures.Future(),
      left,
    )
    if not turn.missing:
      turn.done.set_result({})
    for worker in self.interpreters.values():
      worker.begin(turn)
    return turn.done

  # What threads ask for.

  def give(self, turn: StepCall, v: int, x):
    """Takes an output from a place."""
    with self._lock:
      turn.outputs[v] = x
      turn.missing.discard(v)
      if not turn.missing and not turn.done.done():
        turn.done.set_result(turn.outputs)

  def send(self, frame: StackFrame, v: int, source: str, target: str, x):
    """Takes a value to another place."""
    way = base.Channel(frame.turn.name, frame.loop, v, source, target)
    if target in self.places:
      x = self.places[target].store(frame.flow.values[v], x)
      self.mail.put(way, x)
    else:
      self.post(way, x)

  def post(self, way: base.Channel, x):
    """Takes a value to a place of another process."""
    raise NotImplementedError(f'Place {way.target!r} is not in this process.')

  def is_there(
    self, frame: StackFrame, v: int, source: str, target: str
  ) -> bool:
    """Whether what another place sends has come."""
    way = base.Channel(frame.turn.name, frame.loop, v, source, target)
    return self.mail.has(way)

  def receive(self, frame: StackFrame, v: int, source: str, target: str):
    """The value that another place has sent, as this one holds it."""
    way = base.Channel(frame.turn.name, frame.loop, v, source, target)
    try:
      x = self.mail.get(way, self.receive_timeout)
    except base.ReceiveTimeoutError as error:
      name = frame.flow.values[v].name
      raise base.StageError(
        f'{error}, {name}, in step {frame.turn.step}{frame.round}: that place '
        'hangs, or takes longer than `receive_timeout` allows.'
      ) from None
    return self.place_for(x, frame.flow.values[v], target)

  def settle(self, arrays):
    """Waits until arrays that will be overwritten are read by nobody else."""
    del arrays  # Within a process JAX sees to that.

  def place_for(self, x, value: graph_lib.Value, target: str):
    """What has come, as a place holds it."""
    del value, target  # Who sent it has put it there.
    return x

  def call(self, frame: StackFrame, node: int):
    """A node of the flow of a frame, made ready to run."""
    return self._calls[frame.turn.name][frame.loop, node].result()

  def fail(self, error: BaseException, turn: StepCall | None = None):
    """Stops every place: whoever waits for a value is given the failure."""
    failure = self.mail.fail(error)
    with self._lock:
      if turn and not turn.done.done():
        turn.done.set_exception(failure)

  @property
  def failure(self) -> BaseException | None:
    """The first thing that went wrong."""
    return self.mail.failure
