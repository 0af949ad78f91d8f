"""Runs the programs of a plan in Ray actors: a process a place, or several.

The driver begins steps and reads what they report. In between it has no part:
every actor works through its own program, and values go from actor to actor.
"""

from collections.abc import Mapping
from concurrent import futures
import contextlib
import threading
from typing import Any

import jax
import ray

from planner import graph as graph_lib
from planner import plan as plan_lib
from rlinf_jax.runtime import actor as actor_lib
from rlinf_jax.runtime import crew as crew_lib
from rlinf_jax.runtime import host, link, local, parcel
from rlinf_jax.runtime import timeline as timeline_lib


class Cluster:
  """A plan's places in actors, which hold the state that steps carry.

  It is used as `local.Local` is.

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
    patience: float | None = None,
  ):
    """Refuses what the plan cannot run; starts nothing.

    Args:
      plan: how to run them.
      flows: records the flows anew, in any process; Ray must be able to carry
        it there.
      step: the flow of a step.
      evaluate: the flow of its evaluation.
      patience: seconds that a place waits for a value of another.
    """
    self.plan = plan
    self.lowered = host.lower(plan, step, evaluate)
    self.timeline = timeline_lib.Timeline()
    self.steps, self._failure, self._tree = 0, None, None
    self._crew = crew_lib.Crew(plan, flows, self.lowered, patience)
    self._wanted: list[str] = []  # Flows to be compiled.
    self._flying: list[futures.Future] = []
    self._life = 0  # How often a state was loaded.
    self._pool, self._lock = futures.ThreadPoolExecutor(64), threading.Lock()

  def way(self, source: str, target: str, value: graph_lib.Value) -> str:
    """How a value goes from place to place, in words."""
    self._begun()
    near = target in self._crew.near(source)
    shared = self.plan.places[target].processes > 1
    return link.way(value.dtype, value.bytes, near, shared)

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
    leaves, self._tree = jax.tree.flatten(state)
    resident = self.lowered['step'].resident
    packed = [ray.put(parcel.pack(x)) for x in leaves]

    def hand_over(name, actor):
      place = self._crew.members[name].place
      own = {i: packed[i] for i, some in enumerate(resident) if place in some}
      return actor.load.remote(self._life, list(own), *own.values())

    self._crew.ask(hand_over)

  def state(self):
    """The carried state, on the driver."""
    self.wait()
    found = {}
    told = self._crew.ask(lambda _, actor: actor.state.remote())
    for leaves in told.values():
      found |= leaves
    leaves = [
      jax.numpy.asarray(parcel.unpack(x)) for _, x in sorted(found.items())
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

  def about(self) -> dict[str, dict[str, Any]]:
    """Where every process of a place is: its id, node, kind of device."""
    self._begun()
    return dict(self._crew.about)

  def _begun(self):
    """Starts the actors that are not there."""
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
    step = self.steps + (name != 'step')
    leaves = ray.put([parcel.pack(x) for x in jax.tree.leaves(inputs)])
    asked = {
      actor.turn.remote(name, step, leaves): member
      for member, actor in self._crew.actors.items()
    }
    made = self._pool.submit(self._collect, asked)
    self._flying = [one for one in self._flying if not one.done()] + [made]
    return local.reported(self.lowered[name].flow, made)

  def _collect(self, asked: Mapping[Any, str]) -> dict[int, Any]:
    """Outputs of a turn, when all actors have taken it."""
    outputs, left = {}, list(asked)
    while left:
      (one,), left = ray.wait(left)
      member = asked[one]
      try:
        given, spans = ray.get(one)
      except ray.exceptions.RayError as error:
        self._fail(member, error)
        raise self._failure from None
      outputs |= {v: parcel.unpack(x) for v, x in given.items()}
      late = self._crew.about[member]['epoch'] - self.timeline.epoch
      self.timeline.extend(
        span._replace(start=span.start + late, end=span.end + late)
        for span in spans
      )
    return outputs

  def _fail(self, member: str, error):
    """Keeps the first failure, and stops all places."""
    with self._lock:
      if self._failure:
        return
      died = [*self._crew.dead().values()]
      self._failure = (died or [crew_lib.told(error, member)])[0]
    for name, actor in self._crew.actors.items():
      if name != member:
        actor.fail.remote(str(self._failure))
    self._crew.disband()
