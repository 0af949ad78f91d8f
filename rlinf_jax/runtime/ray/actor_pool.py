"""The actors of a plan: starts, calls, checks, restarts and ends them."""

from collections.abc import Callable, Mapping, Sequence
import os
import shutil
import tempfile
from typing import Any
import weakref

import ray
from ray import util

from planner.ir import plan as plan_lib
from rlinf_jax.runtime import programs
from rlinf_jax.runtime.base import ProcessDiedError
from rlinf_jax.runtime.ray import actor as actor_lib
from rlinf_jax.runtime.ray import connection, pending, resources
from rlinf_jax.runtime.ray.transport import network

ALIVE = 2.0  # Seconds in which a live process answers.


class ActorPool:
  """The actors of a plan, one for each process of a place.

  The pool owns the actors and the devices that Ray has reserved for them. An
  actor that has died stays in it until `restart` or `cleanup`.

  Attributes:
    processes: all processes of the plan, by name.
    actors: handles of the actors that were started, by process.
    descriptions: where each is, as `Actor.describe`, by process.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    flows: actor_lib.Flows,
    lowered: Mapping[str, programs.Lowered],
    receive_timeout: float | None,
    network_interface: str | None = None,
  ):
    """Checks the plan; starts no process.

    Args:
      plan: with the places.
      flows: records the flows in any process.
      lowered: the driver's programs.
      receive_timeout: seconds that a place waits for a value.
      network_interface: name of the interface on which processes listen; None
        for the loopback interface if all are on one machine, otherwise the one
        that Ray uses.

    Raises:
      ValueError: for a host stage on a place that spans processes.
    """
    self._plan, self._flows = plan, flows
    self._receive_timeout = receive_timeout
    self._interface = self._given_interface = network_interface
    self._fingerprint = programs.fingerprint(lowered)
    self._reservation: resources.Reservation | None = None
    self._lease_folder = ''
    if plan.shared_devices:
      self._lease_folder = folder = tempfile.mkdtemp(prefix='rlinf_jax-')
      weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
    self.actors, self.descriptions = {}, {}
    every = (
      actor_lib.Process(name, rank, place.processes)
      for name, place in plan.places.items()
      for rank in range(place.processes)
    )
    self._killed: set[str] = set()
    self._compiled: list[str] = []  # Flows that every actor compiles.
    self.processes = {str(process): process for process in every}
    _check_host_stages(plan, lowered)

  def start_missing(self):
    """Starts the processes that have no actor.

    Raises:
      ValueError: if there are too few devices for the plan, or an actor has
        recorded another step.
    """
    missing = [name for name in self.processes if name not in self.actors]
    if missing:
      self._start(missing)
      self._connect(self.actors)
      self._compile(missing)

  def restart(self, name: str):
    """Replaces a process that has died; returns the new actor.

    It is given the other actors, and they are given it by `Actor.resend`.
    """
    ray.kill(self.actors.pop(name))
    self._start([name])
    self._connect({name: self.actors[name]})
    self._compile([name])
    return self.actors[name]

  def compile(self, flow: str):
    """Has all actors, present and later ones, compile a flow; returns at once.

    Args:
      flow: its name.
    """
    if flow not in self._compiled:
      self._compiled.append(flow)
      for actor in self.actors.values():
        actor.compile.remote(flow)

  def _compile(self, names: Sequence[str]):
    for name in names:
      for flow in self._compiled:
        self.actors[name].compile.remote(flow)

  def _start(self, names: Sequence[str]):
    """Starts some processes, and has them record the flows."""
    if self._reservation is None:
      connection.connect()
      self._reservation = resources.reserve(self._plan, self.processes)
    if not self.actors:  # A running process keeps its address.
      self._interface = self._choose_interface()
    new = {name: self._new_actor(name) for name in names}
    self.actors |= new
    plan, folder = self._plan.to_json(), os.getcwd()
    self._join(new)
    self.call_all(
      lambda name, actor: actor.prepare.remote(
        self.processes[name],
        plan,
        self._flows,
        self._fingerprint,
        folder,
        self._receive_timeout,
        self._lease_folder,
        self._interface,
      ),
      new,
    )
    self.descriptions |= self.call_all(
      lambda _, actor: actor.describe.remote(), new
    )

  def _choose_interface(self) -> str | None:
    """The narrowest interface by which all processes reach each other."""
    on_one_machine = len(resources.machines(self._reservation)) == 1
    return self._given_interface or (
      network.LOOPBACK if on_one_machine else None
    )

  def _new_actor(self, name: str):
    actor = ray.remote(concurrency_groups=actor_lib.GROUPS)(actor_lib.Actor)
    place = self._plan.places[self.processes[name].place]
    options = resources.actor_options(
      self._reservation, name, place, self._interface
    )
    return actor.options(**options).remote()

  def _join(self, actors):
    """Initializes `jax.distributed` for the processes of one place."""
    spanning = {
      name: actors[name] for name in self._spanning() if name in actors
    }
    first = {
      name: actor
      for name, actor in spanning.items()
      if self.processes[name].rank == 0
    }
    interface = self._interface
    answers = self.call_all(
      lambda _, actor: actor.address.remote(interface), first
    )
    addresses = {
      self.processes[name].place: address for name, address in answers.items()
    }

    def join(name, actor):
      process = self.processes[name]
      return actor.join.remote(addresses[process.place], process, interface)

    self.call_all(join, spanning)

  def _connect(self, actors):
    """Sends some actors the handles of all others."""
    peers = {
      place: [self.actors[name] for name in self._of(place)]
      for place in self._plan.places
    }
    self.call_all(
      lambda name, actor: actor.connect.remote(
        peers, self.same_machine(self.processes[name].place)
      ),
      actors,
    )

  def _of(self, place: str) -> list[str]:
    """The processes of a place."""
    return [name for name, x in self.processes.items() if x.place == place]

  def _spanning(self) -> list[str]:
    """The processes of places that have several."""
    return [name for name, x in self.processes.items() if x.count > 1]

  def same_machine(self, place: str) -> set[str]:
    """Places that a place reaches by shared memory.

    These are processors of the same machine, and places that share devices.
    """
    here = self.descriptions[self._of(place)[0]]
    shared = self._plan.lease_devices(place)

    def is_near(name):
      there = self.descriptions[name]
      return (
        here['platform'] == there['platform'] == 'cpu'
        and here['node'] == there['node']
      )

    return {
      other
      for other in self._plan.places
      if all(map(is_near, self._of(other)))
      or shared
      or self._plan.lease_devices(other)
    }

  def call_all(
    self,
    call: Callable[[str, Any], Any],
    actors: Mapping[str, Any] | None = None,
  ) -> dict[str, Any]:
    """Calls actors at the same time; blocks for their answers, by process.

    Args:
      call: `process, actor -> reference`.
      actors: all, if not given.

    Raises:
      ProcessDiedError: if one has died.
      StageError: if one fails otherwise.
    """
    actors = self.actors if actors is None else actors
    names = {call(name, actor): name for name, actor in actors.items()}
    answers, unanswered = {}, list(names)
    # In order of arrival: one may wait for another that has died.
    while unanswered:
      (reference,), unanswered = ray.wait(unanswered)
      name = names[reference]
      try:
        answers[name] = ray.get(reference)
      except ray.exceptions.RayError as error:
        raise pending.as_stage_error(error, name) from None
    return {name: answers[name] for name in names.values()}

  def dead(self) -> dict[str, ProcessDiedError]:
    """The processes that have died, with the error of each."""
    names = {
      actor.describe.remote(): name for name, actor in self.actors.items()
    }
    answered, _ = ray.wait(list(names), num_returns=len(names), timeout=ALIVE)
    found = {}
    for reference in answered:
      name = names[reference]
      try:
        ray.get(reference)
      except ray.exceptions.RayActorError as error:
        found[name] = pending.as_stage_error(error, name)
    return found

  def kill_spanning(self):
    """Kills the processes of places that span several, after a failure.

    Where one of them stops, the others would block in a collective for ever.
    """
    self._kill(self._spanning())

  def kill_place_of(self, name: str):
    """As `kill_spanning`, of one place: that of a process that has failed."""
    place = self._of(self.processes[name].place)
    self._kill([other for other in self._spanning() if other in place])

  def _kill(self, names: Sequence[str]):
    for name in names:
      if name in self.actors:
        ray.kill(self.actors[name])
        self._killed.add(name)

  def death_in_place(self, name: str) -> ProcessDiedError | None:
    """The error of a process that has died in the place of another.

    Args:
      name: of the other process.
    """
    place = self._of(self.processes[name].place)
    if len(place) == 1:
      return None  # Its own error says whether it has died.
    deaths = (error for k, error in self.dead().items() if k in place)
    return next(deaths, None)

  def cleanup(self):
    """Drops the actors of places that lost a process, to start them again."""
    if not self.actors:
      return
    gone = self.dead().keys() | self._killed
    for place in {self.processes[name].place for name in gone}:
      for name in self._of(place):
        ray.kill(self.actors.pop(name))
    self._killed.clear()

  def close(self):
    """Ends all actors, and frees the reserved devices."""
    for actor in self.actors.values():
      ray.kill(actor)
    self.actors = {}
    if self._reservation:
      util.remove_placement_group(self._reservation.group)
      self._reservation = None


def _check_host_stages(plan, lowered):
  """Refuses host stages on places that span processes.

  Each process would call them, and their results could differ.

  Raises:
    ValueError: if there is one.
  """
  for flow_programs in lowered.values():
    for name, program in flow_programs.programs.items():
      count = plan.places[name].processes
      for _, flow, op, _ in programs.stage_calls(flow_programs.flow, program):
        node = flow.nodes[op.node]
        if count > 1 and node.stage.host:
          raise ValueError(
            f'Stage {node.name} does not run in JAX, and place {name!r} is of '
            f'{count} processes, which run JAX together: plan it on a place of '
            'one process.'
          )
