"""Runs the programs of a plan in this process, a thread a place."""

import collections
from concurrent import futures
import dataclasses
import queue
import threading
from typing import Any
import weakref

import jax
import jax.numpy as jnp

from planner import graph as graph_lib
from planner import passes
from planner import plan as plan_lib
from planner import program as program_lib
from planner.costs import cost as cost_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime import timeline as timeline_lib
from sharding import offload
from sharding import rules as rules_lib


class StageError(RuntimeError):
  """A stage failed; says which, where and when."""


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


@dataclasses.dataclass(eq=False)
class Turn:
  """One call of a flow, on its way through the places.

  Attributes:
    name: of the flow.
    step: the update that it is, from one; an evaluation is before the next.
    inputs: by value.
    outputs: by value, as they come.
    missing: values that are still to come.
    done: set when all outputs are there, or at the first failure.
  """

  name: str
  step: int
  inputs: dict[int, Any]
  outputs: dict[int, Any]
  missing: set[int]
  done: futures.Future


class Local:
  """A plan's places in this process, holding the state that steps carry.

  Each place is a thread over devices of its own. It works through its program
  step by step and waits for nobody but those whose values it needs.

  Attributes:
    timeline: what ran when.
    steps: updates begun.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    rules: rules_lib.Rules = rules_lib.DEFAULT,
    cost: cost_lib.Cost = cost_lib.EQUAL,
  ):
    """Refuses what the plan cannot run; computes nothing.

    Args:
      plan: how to run them.
      step: the flow of its step.
      evaluate: the flow of its evaluation, which carries the state unchanged;
        it is not cut.
      rules: from letters to mesh axes.
      cost: decides who goes first where several stages could.
    """
    self.plan = plan
    self.lowered = {'step': _lower(step, plan, cost)}
    if evaluate:
      whole = dataclasses.replace(plan, pieces=1)
      resident = self.lowered['step'].resident
      self.lowered['evaluate'] = _lower(evaluate, whole, cost, resident)
    self.places = {
      name: place_lib.Place(name, placement, plan.rows, rules)
      for name, placement in plan.places.items()
    }
    self.timeline = timeline_lib.Timeline()
    self.steps = 0
    self._calls, self._failure, self._tree = {}, None, None
    self._links = collections.defaultdict(queue.SimpleQueue)
    self._lock = threading.Lock()
    self._check()
    self._workers = {
      name: _Worker(self, place) for name, place in self.places.items()
    }

  def _check(self):
    for lowered in self.lowered.values():
      flow = lowered.flow
      for name, program in lowered.programs.items():
        place = self.places[name]
        for op in program:
          if isinstance(op, program_lib.Run):
            node = flow.nodes[op.node]
            for v in (*node.reads, *node.writes):
              place.layout(flow.values[v])
            place.check_rows(flow, node)

  def ambient(self):
    """A context in which checkpoints are read straight to where they go."""
    resident = self.lowered['step'].resident
    count = collections.Counter(places[0] for places in resident)
    most = max(count, key=count.get, default=next(iter(self.places)))
    return self.places[most].ambient()

  def load(self, state, steps: int = 0):
    """Lays out `state` as the plan has it; a copy, as steps overwrite it.

    A runtime in which something failed begins anew.

    Args:
      state: the workflow's, as arrays.
      steps: updates that led to it.
    """
    for worker in self._workers.values():
      worker.wait()
    self._failure = None
    self._links.clear()
    lowered, self.steps = self.lowered['step'], steps
    leaves, self._tree = jax.tree.flatten(state)
    for name, worker in self._workers.items():
      here = [i for i, places in enumerate(lowered.resident) if name in places]
      laid = [
        worker.place.put(lowered.flow.values[lowered.flow.carry[i][0]], x)
        for i, x in ((i, leaves[i]) for i in here)
      ]
      if laid:
        laid = jax.jit(lambda xs: [jnp.copy(x) for x in xs])(laid)
      worker.state = dict(zip(here, laid, strict=True))

  def state(self):
    """The carried state. The next step overwrites it: copy what must last."""
    self.wait()
    resident = self.lowered['step'].resident
    leaves = [self._workers[p].state[i] for i, (p, *_) in enumerate(resident)]
    return jax.tree.unflatten(self._tree, leaves)

  def wait(self):
    """Returns when every place has done all that it was asked to.

    Raises:
      StageError: if one of them failed.
    """
    for worker in self._workers.values():
      worker.wait()
    if self._failure:
      raise self._failure

  def close(self):
    """Ends the threads, each after the instruction that it is at."""
    self.fail(RuntimeError('The runtime was closed.'))
    for worker in self._workers.values():
      worker.close()

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name in self._calls:
      return
    lowered = self.lowered[name]
    pool = futures.ThreadPoolExecutor(2)
    calls = {}
    for place, program in lowered.programs.items():
      for op in program:
        if isinstance(op, program_lib.Run):
          calls[op.node] = pool.submit(
            self.places[place].compile,
            lowered.flow,
            lowered.flow.nodes[op.node],
            op.donate,
          )
    self._calls[name] = calls
    pool.shutdown(wait=False)

  def submit(self, batch, key) -> futures.Future:
    """Begins a step; returns the future of what it reports.

    A step that is begun before the last has ended overlaps with it as far as
    its values allow.
    """
    return self._begin('step', batch, key)

  def step(self, batch, key):
    """One step of the workflow, to its end; returns what it reports."""
    made = self.submit(batch, key)
    self.wait()
    return made.result()

  def evaluate(self, batch, key):
    """Evaluates the state as it is; returns what it reports."""
    made = self._begin('evaluate', batch, key)
    self.wait()
    return made.result()

  def _begin(self, name, *inputs):
    if self._failure:
      raise self._failure
    self.compile(name)
    flow = self.lowered[name].flow
    self.steps += name == 'step'
    turn = Turn(
      name,
      self.steps + (name != 'step'),
      dict(zip(flow.inputs, jax.tree.leaves(inputs), strict=True)),
      {},
      set(flow.outputs),
      futures.Future(),
    )
    if not turn.missing:
      turn.done.set_result(jax.tree.unflatten(flow.gives, []))
    for worker in self._workers.values():
      worker.begin(turn)
    return turn.done

  def give(self, turn: Turn, v: int, x):
    """Takes an output from a place."""
    flow = self.lowered[turn.name].flow
    with self._lock:
      turn.outputs[v] = x
      turn.missing.discard(v)
      if not turn.missing and not turn.done.done():
        leaves = [turn.outputs[v] for v in flow.outputs]
        turn.done.set_result(jax.tree.unflatten(flow.gives, leaves))

  def link(self, turn: Turn, v: int, source: str, target: str):
    """The queue of a value's way, which keeps the order of steps."""
    with self._lock:
      link = self._links[turn.name, v, source, target]
      if self._failure:
        link.put(self._failure)
      return link

  def call(self, turn: Turn, node: int):
    """A node of the turn's flow, made ready to run."""
    return self._calls[turn.name][node].result()

  def fail(self, error: BaseException, turn: Turn | None = None):
    """Stops every place: whoever waits for a value is given the failure."""
    with self._lock:
      self._failure = self._failure or error
      for link in self._links.values():
        link.put(self._failure)
      if turn and not turn.done.done():
        turn.done.set_exception(self._failure)

  @property
  def failure(self) -> BaseException | None:
    """The first thing that went wrong."""
    return self._failure


def _lower(flow, plan, cost, resident=None) -> Lowered:
  starts = [start for start, _ in flow.carry]
  if resident is not None:
    resident = dict(zip(starts, resident, strict=True))
  # Where values live does not depend on how they are cut.
  resident = resident or program_lib.homes(flow, plan)
  cut, programs = passes.lower(flow, plan, cost, resident)
  return Lowered(cut, programs, tuple(resident[start] for start in starts))


class _Worker:
  """A place's thread, and what it holds from step to step.

  Attributes:
    place: where it works.
    state: what it holds, by number in the carry.
  """

  def __init__(self, runtime: Local, place: place_lib.Place):
    # It must not keep alive what keeps it alive: its thread ends with them.
    self.runtime, self.place = weakref.proxy(runtime), place
    self.state: dict[int, Any] = {}
    self._thread = futures.ThreadPoolExecutor(1, place.name)
    self._last = None

  def begin(self, turn: Turn):
    """Takes a turn when those before it have been taken."""
    self._last = self._thread.submit(self._guarded, turn)

  def wait(self):
    """Returns when all turns have been taken."""
    if self._last:
      self._last.result()

  def close(self):
    """Ends the thread, after the turns that it was given."""
    self._thread.shutdown()

  def _guarded(self, turn: Turn):
    try:
      self._take(turn)
    except BaseException as error:  # noqa: BLE001 (whoever waits must know)
      self.runtime.fail(error, turn)

  def _take(self, turn: Turn):
    """One turn of this place's program."""
    lowered = self.runtime.lowered[turn.name]
    flow, program = lowered.flow, lowered.programs[self.place.name]
    starts = [start for start, _ in flow.carry]
    memory = {starts[i]: x for i, x in self.state.items()}
    kept = {}
    for op in program:
      if self.runtime.failure:
        raise self.runtime.failure
      self._interpret(turn, flow, op, memory, kept)
    memory |= kept
    self.state = {i: memory[starts[i]] for i in self.state}

  def _interpret(self, turn, flow, op, memory, kept):
    here, line = self.place.name, self.runtime.timeline
    start = line.now()
    match op:
      case program_lib.Run(i, donate):
        node = flow.nodes[i]
        self._run(turn, node, i, memory)
        line.add(turn.step, here, 'run', node.name, start, node.piece)
        for v in donate:
          del memory[v]
      case program_lib.Send(v, target):
        if target == program_lib.SINK:
          self.runtime.give(turn, v, memory[v])
        else:
          x = self.runtime.places[target].put(flow.values[v], memory[v])
          self.runtime.link(turn, v, here, target).put(x)
          line.add(turn.step, here, 'send', flow.values[v].name, start)
      case program_lib.Recv(v, source) if source == program_lib.SOURCE:
        memory[v] = self.place.put(flow.values[v], turn.inputs[v])
      case program_lib.Recv(v, source):
        x = self.runtime.link(turn, v, source, here).get()
        if isinstance(x, BaseException):
          raise x
        memory[v] = jax.block_until_ready(x)
        line.add(turn.step, here, 'wait', flow.values[v].name, start)
      case program_lib.Keep(end, v):
        kept[v] = memory[end]
      case program_lib.Drop(v):
        del memory[v]
      case program_lib.Evict(v):
        memory[v] = jax.block_until_ready(offload.to_host(memory[v]))
        line.add(turn.step, here, 'evict', flow.values[v].name, start)
      case program_lib.Restore(v):
        memory[v] = jax.block_until_ready(offload.to_device(memory[v]))
        line.add(turn.step, here, 'restore', flow.values[v].name, start)

  def _run(self, turn, node, i, memory):
    try:
      made = self.runtime.call(turn, i)(*(memory[v] for v in node.reads))
      # Seconds by stage are worth more than a dispatch ahead of the device.
      jax.block_until_ready(made)
    except Exception as error:
      piece, pieces = node.piece
      which = f', piece {piece + 1} of {pieces}' if pieces > 1 else ''
      raise StageError(
        f'Stage {node.name} on place {self.place.name!r} failed in step '
        f'{turn.step}{which}: {error}'
      ) from error
    memory.update(zip(node.writes, made, strict=True))
