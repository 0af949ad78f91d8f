"""Runs the programs of a plan in this process, a thread a place."""

import collections
from concurrent import futures
import dataclasses
import queue
import threading

import jax
import jax.numpy as jnp

from planner import graph as graph_lib
from planner import passes
from planner import plan as plan_lib
from planner import program as program_lib
from planner.costs import cost as cost_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime import worker as worker_lib
from rlinf_jax.runtime.worker import StageError, Turn
from sharding import rules as rules_lib

__all__ = ['Local', 'Lowered', 'StageError']


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
      equal = cost_lib.EQUAL  # The costs may be of a step's stages alone.
      self.lowered['evaluate'] = _lower(evaluate, whole, equal, resident)
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
      name: worker_lib.Worker(self, place)
      for name, place in self.places.items()
    }

  def _check(self):
    for lowered in self.lowered.values():
      for name, program in lowered.programs.items():
        place = self.places[name]
        for _, flow, op in _runs(lowered.flow, program):
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
      for loop, flow, op in _runs(lowered.flow, program):
        calls[loop, op.node] = pool.submit(
          self.places[place].compile, flow, flow.nodes[op.node], op.donate
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

  def link(self, frame: worker_lib.Frame, v: int, source: str, target: str):
    """The queue of a value's way, which keeps the order of steps."""
    with self._lock:
      link = self._links[frame.turn.name, frame.loop, v, source, target]
      if self._failure:
        link.put(self._failure)
      return link

  def call(self, frame: worker_lib.Frame, node: int):
    """A node of the flow of a frame, made ready to run."""
    return self._calls[frame.turn.name][frame.loop, node].result()

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


def _runs(flow, program, loop=()):
  """Its calls of stages, those in loops too: which loops, whose flow, what."""
  for op in program:
    if isinstance(op, program_lib.Run):
      yield loop, flow, op
    elif isinstance(op, program_lib.Repeat):
      body = flow.nodes[op.node].body
      yield from _runs(body, op.program, (*loop, op.node))


def _lower(flow, plan, cost, resident=None) -> Lowered:
  starts = [start for start, _ in flow.carry]
  if resident is not None:
    resident = dict(zip(starts, resident, strict=True))
  # Where values live does not depend on how they are cut.
  resident = resident or program_lib.homes(flow, plan)
  cut, programs = passes.lower(flow, plan, cost, resident)
  return Lowered(cut, programs, tuple(resident[start] for start in starts))
