"""Places of a plan that run in this process, and what their threads ask for."""

import collections
from collections.abc import Callable, Mapping
from concurrent import futures
import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp

from planner.costs import cost as cost_lib
from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from planner.lower import passes, recovery
from planner.lower import program as program_lib
from rlinf_jax.runtime import interpreter as interpreter_lib
from rlinf_jax.runtime import mailbox as mailbox_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime.interpreter import Frame, StageError, Turn


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A flow as a plan runs it.

  Attributes:
    flow: cut and ordered.
    programs: of every place.
    resident: places that hold each carried value, by its number in the carry.
  """

  flow: graph_lib.Flow
  programs: dict[str, tuple[program_lib.Instruction, ...]]
  resident: tuple[tuple[str, ...], ...]


def lower(
  plan: plan_lib.Plan,
  step: graph_lib.Flow,
  evaluate: graph_lib.Flow | None = None,
  cost: cost_lib.Cost = cost_lib.EQUAL,
) -> dict[str, Lowered]:
  """A step and an evaluation, by name, as a plan runs them.

  Args:
    plan: how to run them.
    step: the flow of its step.
    evaluate: the flow of its evaluation, which carries the state unchanged; it
      is not cut.
    cost: decides who goes first where several stages could.
  """
  lowered = {'step': _lower(step, plan, cost)}
  if evaluate:
    whole = dataclasses.replace(plan, pieces=1)
    resident = lowered['step'].resident
    equal = cost_lib.EQUAL  # The costs may be of a step's stages alone.
    lowered['evaluate'] = _lower(evaluate, whole, equal, resident)
  return lowered


def _lower(flow, plan, cost, resident=None) -> Lowered:
  starts = [start for start, _ in flow.carry]
  if resident is not None:
    resident = dict(zip(starts, resident, strict=True))
  # Where values live does not depend on how they are cut.
  resident = resident or program_lib.homes(flow, plan)
  cut, programs = passes.lower(flow, plan, cost, resident)
  return Lowered(cut, programs, tuple(resident[start] for start in starts))


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
    patience: seconds to wait for a value; None for ever.
  """

  def __init__(
    self,
    lowered: Mapping[str, Lowered],
    places: Mapping[str, place_lib.Place],
    patience: float | None = None,
  ):
    """Refuses what the places cannot run; computes nothing."""
    self.lowered, self.places = dict(lowered), dict(places)
    self.patience = patience
    self.timeline = timeline_lib.Timeline()
    self.mail = mailbox_lib.Mail()
    self._calls, self._lock = {}, threading.Lock()
    self._check()
    self.workers = {
      name: interpreter_lib.Worker(self, place)
      for name, place in places.items()
    }

  def _check(self):
    for lowered in self.lowered.values():
      for name, place in self.places.items():
        program = lowered.programs[name]
        for _, flow, op, _ in runs(lowered.flow, program):
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
    for worker in self.workers.values():
      worker.wait()
    self.mail.clear()
    lowered = self.lowered['step']
    for name, worker in self.workers.items():
      here = [i for i, places in enumerate(lowered.resident) if name in places]
      laid = [
        worker.place.take_in(lowered.flow.values[lowered.flow.carry[i][0]], x)
        for i, x in ((i, leaves[i]) for i in here)
      ]
      if laid and not worker.place.lease:  # In host memory nothing overwrites.
        laid = jax.jit(lambda xs: [jnp.copy(x) for x in xs])(laid)
      worker.state = dict(zip(here, laid, strict=True))

  def leaves(self) -> dict[int, jax.Array]:
    """Carried values whose first home is here; a step overwrites them."""
    return {
      i: self.workers[first].state[i]
      for i, (first, *_) in enumerate(self.lowered['step'].resident)
      if first in self.workers
    }

  def wait(self):
    """Returns when every place has done all that it was asked to.

    Raises:
      StageError: if one of them failed.
    """
    for worker in self.workers.values():
      worker.wait()
    if self.failure:
      raise self.failure

  def close(self):
    """Ends the threads, each after the instruction that it is at."""
    self.fail(RuntimeError('The runtime was closed.'))
    for worker in self.workers.values():
      worker.close()

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name in self._calls:
      return
    lowered = self.lowered[name]
    pool = futures.ThreadPoolExecutor(2)
    calls = {}
    for place, made in self.places.items():
      for loop, flow, op, passed in runs(lowered.flow, lowered.programs[place]):
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
    turn = Turn(
      name,
      step,
      dict(zip(lowered.flow.inputs, leaves, strict=True)),
      {},
      set().union(*(_given(lowered.programs[place]) for place in self.places)),
      futures.Future(),
      left,
    )
    if not turn.missing:
      turn.done.set_result({})
    for worker in self.workers.values():
      worker.begin(turn)
    return turn.done

  # What threads ask for.

  def give(self, turn: Turn, v: int, x):
    """Takes an output from a place."""
    with self._lock:
      turn.outputs[v] = x
      turn.missing.discard(v)
      if not turn.missing and not turn.done.done():
        turn.done.set_result(turn.outputs)

  def send(self, frame: Frame, v: int, source: str, target: str, x):
    """Takes a value to another place."""
    way = mailbox_lib.Way(frame.turn.name, frame.loop, v, source, target)
    if target in self.places:
      x = self.places[target].take_in(frame.flow.values[v], x)
      self.mail.put(way, x)
    else:
      self.post(way, x)

  def post(self, way: mailbox_lib.Way, x):
    """Takes a value to a place of another process."""
    raise NotImplementedError(f'Place {way.target!r} is not in this process.')

  def is_there(self, frame: Frame, v: int, source: str, target: str) -> bool:
    """Whether what another place sends has come."""
    way = mailbox_lib.Way(frame.turn.name, frame.loop, v, source, target)
    return self.mail.has(way)

  def receive(self, frame: Frame, v: int, source: str, target: str):
    """The value that another place has sent, as this one holds it."""
    way = mailbox_lib.Way(frame.turn.name, frame.loop, v, source, target)
    try:
      x = self.mail.get(way, self.patience)
    except mailbox_lib.LateError as error:
      name = frame.flow.values[v].name
      raise StageError(
        f'{error}, {name}, in step {frame.turn.step}{frame.round}: that place '
        'hangs, or takes longer than `patience` allows.'
      ) from None
    return self.place_for(x, frame.flow.values[v], target)

  def settle(self, arrays):
    """Waits until arrays that will be overwritten are read by nobody else."""
    del arrays  # Within a process JAX sees to that.

  def place_for(self, x, value: graph_lib.Value, target: str):
    """What has come, as a place holds it."""
    del value, target  # Who sent it has put it there.
    return x

  def call(self, frame: Frame, node: int):
    """A node of the flow of a frame, made ready to run."""
    return self._calls[frame.turn.name][frame.loop, node].result()

  def fail(self, error: BaseException, turn: Turn | None = None):
    """Stops every place: whoever waits for a value is given the failure."""
    failure = self.mail.fail(error)
    with self._lock:
      if turn and not turn.done.done():
        turn.done.set_exception(failure)

  @property
  def failure(self) -> BaseException | None:
    """The first thing that went wrong."""
    return self.mail.failure


def runs(flow, program, loop=()):
  """Its calls of stages, those in loops too.

  Yields:
    The loops that it is in, the flow, the call, and the values of that flow
    that other instructions than calls have to do with.
  """
  passed = frozenset(v for op in program for v in program_lib.passed(op))
  for op in program:
    if isinstance(op, program_lib.Run):
      yield loop, flow, op, passed
    elif isinstance(op, program_lib.Repeat):
      body = flow.nodes[op.node].body
      yield from runs(body, op.program, (*loop, op.node))


def traffic(
  lowered: Lowered, way: Callable[[str, str, graph_lib.Value], str]
) -> list[tuple[str, str, str, int]]:
  """What goes from place to place in a step, rounds of loops apart.

  Args:
    lowered: a step.
    way: how a value travels from place to place.

  Returns:
    Source, target, way and bytes.
  """
  total = collections.Counter()
  for source, program in lowered.programs.items():
    for op in program:
      if isinstance(op, program_lib.Send) and op.place != program_lib.SINK:
        value = lowered.flow.values[op.value]
        how = way(source, op.place, value)
        total[source, op.place, how] += value.bytes
  return [(*ends, size) for ends, size in total.items()]


def _given(program) -> set[int]:
  """Values that a place hands out."""
  return {
    op.value
    for op in program
    if isinstance(op, program_lib.Send) and op.place == program_lib.SINK
  }
