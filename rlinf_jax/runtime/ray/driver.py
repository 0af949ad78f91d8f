"""Runs the programs of a plan in Ray actors: a process a place, or several.

The driver begins steps and reads what they report. In between it has no part:
every actor works through its own program, and values go from actor to actor.
"""

import collections
from concurrent import futures
import contextlib
import threading
import time
from typing import Any

import jax
import ray

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from planner.lower import recovery
from rlinf_jax.runtime import base, local, programs
from rlinf_jax.runtime import timeline as timeline_lib
from rlinf_jax.runtime.base import ProcessDiedError, StageError
from rlinf_jax.runtime.ray import actor as actor_lib
from rlinf_jax.runtime.ray import actor_pool as actor_pool_lib
from rlinf_jax.runtime.ray import channel, serialize
from rlinf_jax.runtime.ray import pending as pending_lib


class RayRuntime:
  """A plan's places in actors, which hold the state that steps carry.

  It is used as `local.LocalRuntime` is.

  Attributes:
    plan: what runs.
    lowered: flows by name.
    timeline: what ran when, on the driver's clock.
    steps: updates begun.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    *,
    step: graph_lib.Flow,
    evaluate: graph_lib.Flow | None = None,
    receive_timeout: float | None = None,
  ):
    """Refuses what the plan cannot run; starts nothing.

    Args:
      plan: how to run them.
      flows: records the flows anew, in any process; Ray must be able to carry
        it there.
      step: the flow of a step.
      evaluate: the flow of its evaluation.
      receive_timeout: seconds that a place waits for a value of another.
    """
    self.plan = plan
    self.lowered = programs.lower(plan, step, evaluate)
    self.timeline = timeline_lib.Timeline()
    self.steps, self._failure, self._tree = 0, None, None
    self._crew = actor_pool_lib.ActorPool(
      plan, flows, self.lowered, receive_timeout
    )
    self._wanted: list[str] = []  # Flows to be compiled.
    self._flying: list[futures.Future] = []
    self._life = 0  # How often a state was loaded.
    self._loaded = []  # What of it others may need again.
    self._first = 0  # The step that is next then.
    self._counts = collections.Counter()  # Turns begun since, by flow.
    self._sent = {}  # By process, how much has left it on ways within loops.
    self._turns: list[
      pending_lib.PendingCall
    ] = []  # Those that have not ended.
    self._taken: dict[str, int] = {}  # The turns that each place has.
    self._replaceable = actor_lib.replaceable(plan, self.lowered)
    self._renewed: dict[str, int] = {}  # The turn that another began with.
    self._said: list[str] = []
    self._pool, self._lock = futures.ThreadPoolExecutor(64), threading.RLock()

  def transport(self, source: str, target: str, value: graph_lib.Value) -> str:
    """How a value goes from place to place, in words."""
    self._begun()
    near = target in self._crew.near(source)
    shared = self.plan.places[target].processes > 1
    return channel.transport(value.dtype, value.bytes, near, shared)

  def ambient(self):
    """The driver reads checkpoints as they are; actors lay them out."""
    return contextlib.nullcontext()

  def compile(self, name: str):
    """Begins to make every stage of a flow ready; does not wait for it."""
    if name not in self._wanted:
      self._wanted.append(name)
      for actor in self._crew.actors.values():
        actor.compile.remote(name)

  def load(self, state, steps: int = 0):
    """Hands `state` to the actors that hold it.

    A runtime in which something failed begins anew.

    Args:
      state: the workflow's, as arrays.
      steps: updates that led to it.
    """
    futures.wait(self._flying)
    self._crew.bury()
    self._begun()
    self._failure, self._flying, self.steps = None, [], steps
    self._life += 1
    self._counts, self._turns = collections.Counter(), []
    self._taken, self._sent, self._first = {}, {}, steps + 1
    self._renewed = {}
    leaves, self._tree = jax.tree.flatten(state)
    self._loaded = [ray.put(serialize.pack(x)) for x in leaves]

    def hand_over(name, actor):
      own = self._own(name)
      return actor.load.remote(self._life, None, list(own), *own.values())

    self._crew.ask(hand_over)
    resident = self.lowered['step'].resident
    self._loaded = [
      x if self._replaceable.keys() & {*some} else None
      for x, some in zip(self._loaded, resident, strict=True)
    ]

  def _own(self, member: str) -> dict[int, Any]:
    """What was loaded of the carry of a process, by its numbers."""
    place = self._crew.members[member].place
    resident = self.lowered['step'].resident
    return {
      i: self._loaded[i] for i, some in enumerate(resident) if place in some
    }

  def state(self):
    """The carried state, on the driver."""
    self.wait()
    found = {}

    def ask():
      return self._crew.ask(lambda _, actor: actor.state.remote())

    try:
      told = ask()
    except StageError:  # Or of who waited for one that is no more.
      self._heal()
      told = ask()
    for leaves in told.values():
      found |= leaves
    leaves = [
      jax.numpy.asarray(serialize.unpack(x)) for _, x in sorted(found.items())
    ]
    return jax.tree.unflatten(self._tree, leaves)

  def submit(self, batch, key) -> futures.Future:
    """Begins a step; returns the future of what it reports."""
    return self._begin('step', batch, key)

  def step(self, batch, key):
    """One step of the workflow, to its end; returns what it reports."""
    return self._ended(self.submit(batch, key))

  def evaluate(self, batch, key):
    """Evaluates the state as it is; returns what it reports."""
    return self._ended(self._begin('evaluate', batch, key))

  def _ended(self, made):
    self.wait()
    return made.result()

  def wait(self):
    """Returns when every place has done all that it was asked to.

    Raises:
      StageError: if one of them failed.
    """
    futures.wait(self._flying)
    if self._failure:
      raise self._failure

  def close(self):
    """Ends the actors."""
    self._crew.end()
    self._pool.shutdown(wait=False)

  def processes(self) -> dict[str, dict[str, Any]]:
    """Where every process of a place is: its id, node, kind of device."""
    self._begun()
    return dict(self._crew.about)

  def _begun(self):
    """Starts the actors that are not there."""
    with self._lock:
      for name in self._crew.ready():
        for wanted in self._wanted:
          self._crew.actors[name].compile.remote(wanted)

  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes sent from place to place, and seconds that took, by the ends."""
    found = {}
    for some in self._crew.ask(lambda _, actor: actor.moved.remote()).values():
      found |= some
    return found

  def _begin(self, name, *inputs):
    if self._failure:
      raise self._failure
    self._begun()
    self.steps += name == 'step'
    turn = self._turn(name, self.steps + (name != 'step'), inputs)
    with self._lock:  # No process is taken over meanwhile.
      self._counts[name] += 1
      self._turns.append(turn)
      for member in self._crew.actors:
        self._ask(turn, member)
    made = self._pool.submit(self._collect, turn)
    self._flying = [one for one in self._flying if not one.done()] + [made]
    return local.reported(self.lowered[name].flow, made)

  def _turn(self, name: str, step: int, inputs=()) -> pending_lib.PendingCall:
    """The next turn."""
    leaves = ray.put([serialize.pack(x) for x in jax.tree.leaves(inputs)])
    return pending_lib.PendingCall(
      name, step, leaves, self._counts.total(), self._counts[name]
    )

  def _ask(
    self, turn: pending_lib.PendingCall, member: str, left=recovery.EVERYTHING
  ):
    """Has a process take its part in a turn."""
    asked = self._crew.actors[member].turn.remote(
      *(turn.name, turn.step, turn.leaves, turn.number, turn.count),
      *(dict(self._taken), left),
    )
    turn.of[asked] = member

  def _collect(self, turn: pending_lib.PendingCall) -> dict[int, Any]:
    """Outputs of a turn, when all actors have taken it."""
    outputs = {}
    while turn.of:
      (one, *_), _ = ray.wait(list(turn.of))
      try:
        given, spans, sent, said = ray.get(one)
      except ray.exceptions.RayError as error:
        self._mend(turn, one, error)
        continue
      with self._lock:
        member = turn.of.pop(one, None)
        if member is None:
          continue  # It died since, and another does that again.
        place = self._crew.members[member].place
        if turn.number >= self._taken.get(place, 0):  # Or it is heard late.
          self._sent[member], self._taken[place] = sent, turn.number + 1
        self._said += [f'{member}: {line}' for line in said]
      outputs |= {v: serialize.unpack(x) for v, x in given.items()}
      late = self._crew.about[member]['epoch'] - self.timeline.epoch
      self.timeline.extend(
        span._replace(start=span.start + late, end=span.end + late)
        for span in spans
      )
    with self._lock:
      self._turns.remove(turn)
    return outputs

  def _mend(self, turn: pending_lib.PendingCall, asked, error):
    """Has another process take over, or keeps the failure.

    Raises:
      StageError: if nobody can.
    """
    with self._lock:
      if asked not in turn.of:
        return  # That was done since.
      member = turn.of[asked]
      died = isinstance(error, ray.exceptions.RayActorError)
      if not self._failure and died and member in self._replaceable:
        try:
          self._take_over(member)
          return
        except pending_lib.FAILURES:
          pass  # What happened is told by who died.
      self._fail(member, error)
    raise self._failure

  def _take_over(self, member: str):
    """Puts up a process anew, in the middle of what it was doing.

    Raises:
      LookupError: if it cannot be given what it needs.
    """
    start = time.perf_counter()
    turns = [turn for turn in self._turns if self._lacks(turn, member)]
    first = turns[0] if turns else self._turn('step', self.steps + 1)
    step = self.lowered['step']
    if any(
      name != member and first.number <= turn + 1
      for name, turn in self._renewed.items()
    ):
      raise LookupError('Who would send it again was lost itself.')
    actor = self._crew.again(member)
    for name in self._wanted:
      actor.compile.remote(name)
    own = self._own(member)
    sent = self._sent.get(member, {})
    ray.get(actor.load.remote(self._life, sent, list(own), *own.values()))
    others = {k: x for k, x in self._crew.actors.items() if k != member}
    came = self._crew.ask(
      lambda _, other: other.resend.remote(member, [actor], first.number),
      others,
    )
    readers = collections.Counter(
      (way.value, way.target)
      for counts in came.values()
      for way, count in counts.items()
      if way.flow == first.name and not way.loop and count > first.count
    )
    arrived = {
      at for at, n in readers.items() if n == self.plan.places[at[1]].processes
    }
    lowered = self.lowered[first.name]
    if arrived != readers.keys() and recovery.acts_outside(lowered.flow):
      raise LookupError('Some processes of a place have what others lack.')
    left = recovery.left(lowered.flow, lowered.programs[member], arrived)
    if left is None:
      raise LookupError('An engine would contradict what has arrived.')
    if first.step > self._first:
      starts = {start: i for i, (start, _) in enumerate(step.flow.carry)}
      carried = {
        starts[v]: base.Channel('step', (), op.value, op.place, member)
        for v, op in actor_lib.taken_over(step, member).items()
        if op
      }
      actor.absorb.remote(carried)
    for turn in turns:
      turn.of = {
        k: x
        for k, x in turn.of.items()
        if x != member or pending_lib.answered(k)
      }
      self._ask(turn, member, left if turn is first else recovery.EVERYTHING)
    self._renewed[member] = first.number
    self._said.append(
      f'The process of place {member!r} has died in step {first.step}. Another '
      f'has taken its place, in {time.perf_counter() - start:.1f} s: '
      f'{len(arrived)} of its values had arrived, and '
      f'{len(left.skip)} calls of stages need not be made again.'
    )

  def _lacks(self, turn: pending_lib.PendingCall, member: str) -> bool:
    """Whether a process has not answered for a turn."""
    return any(
      name == member and not pending_lib.answered(asked)
      for asked, name in turn.of.items()
    )

  def _heal(self):
    """Puts up anew who has died between turns.

    Raises:
      ProcessDiedError: if one of them held what nobody else does.
    """
    with self._lock:
      for member, error in self._crew.dead().items():
        if member not in self._replaceable:
          raise error
        try:
          self._take_over(member)
        except pending_lib.FAILURES:
          raise error from None

  def notices(self) -> list[str]:
    """What was got over since this was asked last, a death or less."""
    with self._lock:
      lines, self._said = self._said, []
    return lines

  def _fail(self, member: str, error):
    """Keeps the first failure, and stops all places."""
    if self._failure:
      return
    died = [*self._crew.dead().values()]
    self._failure = (died or [actor_pool_lib.told(error, member)])[0]
    if self._renewed and not died:
      # It may come of a death that was thought survived, such as a pull from
      # who is no more: so the run goes on from its checkpoint, once.
      self._failure = ProcessDiedError(str(self._failure))
    for name, actor in self._crew.actors.items():
      if name != member:
        actor.fail.remote(str(self._failure))
    self._crew.disband()
