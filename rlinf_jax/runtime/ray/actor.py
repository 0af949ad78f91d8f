"""A place in a process of its own, which Ray starts.

It records the same flow as the driver, from the same recipe, and runs its own
program of it: nobody tells it what to do next, and values go from actor to
actor. What it is made of is here; how it is started is in `cluster`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import dataclasses
import hashlib
import os
import socket
from typing import Any, NamedTuple

import jax
import ray

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import recovery
from rlinf_jax.run import allocator, notices
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime import lease as lease_lib
from rlinf_jax.runtime import place as place_lib
from rlinf_jax.runtime.ray import channel, remote_host, serialize
from sharding import rules as rules_lib
from sharding import span

GROUPS = {'turns': 1, 'mail': 1, 'control': 1}  # Threads of each.
Flows = Callable[[], tuple[graph.Flow, graph.Flow | None]]
JOIN = 120  # Seconds that processes of a place wait for each other to begin,
PART = 2  # and to end.


class Process(NamedTuple):
  """A process of a place.

  Attributes:
    place: its name.
    rank: which of its processes; the first alone talks to others.
    of: how many there are.
  """

  place: str
  rank: int
  of: int

  def __str__(self):
    many = f' {self.rank + 1}/{self.of}' * (self.of > 1)
    return f'{self.place}{many}'


def fingerprint(lowered: Mapping[str, programs.Lowered]) -> str:
  """What two processes must agree on to run parts of one step."""
  told = []
  for name, some in sorted(lowered.items()):
    told.append((name, some.programs, some.resident, *_facts(some.flow)))
  return hashlib.sha256(repr(told).encode()).hexdigest()


def replaceable(
  plan: plan_lib.Plan, lowered: Mapping[str, programs.Lowered]
) -> dict[str, frozenset[int]]:
  """Places that another process can take over, and what they are sent to keep.

  That is values of a step which they begin the next one with.
  """
  found = {}
  for name, place in plan.places.items():
    copies = taken_over(lowered['step'], name)
    alone = place.processes == 1 and name not in plan.shared_devices
    if alone and copies is not None:
      found[name] = frozenset(op.value for op in copies.values() if op)
  return found


def taken_over(step: programs.Lowered, place: str):
  """How a place is sent what it holds; as `reissue.copies`."""
  held = {
    start
    for (start, _), places in zip(step.flow.carry, step.resident, strict=True)
    if place in places
  }
  return recovery.copies(step.flow, step.programs[place], held)


def _facts(flow):
  values = [(v.name, v.shape, str(v.dtype), v.letters) for v in flow.values]
  nodes = [
    (n.name, n.reads, n.writes, n.piece, n.body and _facts(n.body))
    for n in flow.nodes
  ]
  return values, nodes, flow.inputs, flow.outputs, flow.carry


class Actor:
  """One place, or one of the processes that share it, and its mail.

  Its methods are called in three groups, a thread each: turns, mail, and what
  must get through while a turn waits.
  """

  def __init__(self):
    # What it is made of may be refused, and a method can say so in words.
    self._host = None
    self._next, self._revived, self._adopted = {}, set(), False

  @ray.method(concurrency_group='control')
  def address(self) -> str:
    """Where the processes of this place can meet: here."""
    with socket.socket() as free:
      free.bind(('', 0))
      return f'{ray.util.get_node_ip_address()}:{free.getsockname()[1]}'

  @ray.method(concurrency_group='control')
  def join(self, address: str, member: Process):
    """Makes the devices of a place's processes one list, before JAX looks.

    Args:
      address: of the first of them.
      member: which of them this is.
    """
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    # It would take SIGTERM for itself, and nobody could end this process.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
      *(address, member.of, member.rank),
      initialization_timeout=JOIN,
      shutdown_timeout_seconds=PART,
    )

  @ray.method(concurrency_group='control')
  def prepare(
    self,
    member: Process,
    plan: str,
    flows: Flows,
    agreed: str,
    folder: str,
    receive_timeout: float | None,
    shared: str,
  ):
    """Records the flows and makes the place ready.

    Args:
      member: the place, and which of its processes this is.
      plan: as JSON.
      flows: records those of a step and of an evaluation.
      agreed: the driver's `fingerprint`.
      folder: the driver's, if there is one like it here.
      receive_timeout: seconds to wait for a value.
      shared: a folder by which places take turns on devices.

    Raises:
      ValueError: if it has recorded something else than the driver.
    """
    allocator.keep()
    notices.keep()
    if os.path.isdir(folder):
      os.chdir(folder)
    name, chosen = member.place, plan_lib.Plan.from_json(plan)
    lowered = programs.lower(chosen, *flows())
    if fingerprint(lowered) != agreed:
      raise ValueError(
        f'Place {name!r} has recorded another step than the driver: do both '
        'have the same code, recipe and packages?'
      )
    # Ray has given it devices of its own, whatever their numbers elsewhere.
    placement = chosen.places[name]
    own = dataclasses.replace(
      placement, devices=tuple(range(len(placement.devices)))
    )
    lease = lease_lib.of_plan(chosen, shared, [name]).get(name)
    place = place_lib.Place(
      name, own, chosen.micro_batch, rules_lib.DEFAULT, lease
    )
    axes = {
      name: place.axes if place.processes == 1 else ()
      for name, place in chosen.places.items()
    }
    leads = member.rank == 0
    lost = replaceable(chosen, lowered)
    self._host = remote_host.RemoteHost(
      leads, lost, axes, lowered, {name: place}, receive_timeout
    )

  @ray.method(concurrency_group='control')
  def meet(self, peers: Mapping[str, Sequence[Any]], near: Set[str]):
    """Makes the other places known, and which share this one's memory."""
    self._host.peers, self._host.near = dict(peers), near

  @ray.method(concurrency_group='control')
  def about(self) -> dict[str, Any]:
    """Where it is: process, node and device."""
    device = jax.local_devices()[0]
    return {
      'pid': os.getpid(),
      'node': ray.get_runtime_context().get_node_id(),
      'device': device.device_kind,
      'platform': device.platform,
      'epoch': self._host.timeline.epoch,
    }

  @ray.method(concurrency_group='turns')
  def load(
    self,
    life: int,
    sent: Mapping[base.Channel, int] | None,
    numbers: Sequence[int],
    *leaves: serialize.Serialized,
  ):
    """Takes over what is carried; forgets what was on its way.

    Args:
      life: how often the driver has loaded a state.
      sent: by a process that this one takes over from, by way within a loop;
        None if this takes over from none.
      numbers: in the carry, of what lives here.
      *leaves: values of that.
    """
    far = self._host
    far.life = -1  # Until the end nobody's mail is taken.
    self._next.clear()
    self._revived.clear()
    self._adopted = sent is not None
    far.sent = dict(sent or {})
    far.retained.clear()
    arrays = map(serialize.unpack, leaves)
    far.load(dict(zip(numbers, arrays, strict=True)))
    far.life = life  # From now on mail is taken.

  @ray.method(concurrency_group='control')
  def resend(
    self, place: str, actors: Sequence[Any], turn: int
  ) -> dict[base.Channel, int]:
    """Makes who has taken over a place known, and sends it what it needs.

    Args:
      place: that was lost.
      actors: that have taken it over.
      turn: that they begin with.

    Returns:
      How many values of the lost place have come here, by way.

    Raises:
      LookupError: if something is not had any more.
    """
    self._revived.add(place)
    self._host.repost(place, actors, turn)
    came = dict(self._next)
    return {way: n for way, n in came.items() if way.source == place}

  @ray.method(concurrency_group='turns')
  def absorb(self, carried: Mapping[int, base.Channel]):
    """Takes what is carried, by its numbers, from those who have sent it."""
    try:
      self._host.absorb(carried)
    except Exception as error:  # noqa: BLE001 (the turn behind it must know)
      self._host.fail(error)

  @ray.method(concurrency_group='turns')
  def state(self) -> dict[int, serialize.Serialized]:
    """Carried values whose first home is here."""
    self._host.wait()
    found = {}
    for i, x in self._host.leaves().items():
      x = span.whole(x)
      if self._host.leads:
        found[i] = serialize.pack(x)
    return found

  @ray.method(concurrency_group='control')
  def compile(self, name: str):
    """Begins to make its stages of a flow ready."""
    self._host.compile(name)

  @ray.method(concurrency_group='turns')
  def turn(
    self,
    name: str,
    step: int,
    leaves: Sequence[serialize.Serialized],
    number: int,
    count: int,
    ended: Mapping[str, int],
    left: recovery.Left = recovery.EVERYTHING,
  ):
    """One call of a flow, to its end here.

    Args:
      name: of the flow.
      step: the update that it is.
      leaves: inputs.
      number: of the turn, since a state was loaded.
      count: of turns of the same flow before it.
      ended: by place, the first turn that it may not have ended.
      left: what there is to do, if this was begun by another process.

    Returns:
      Outputs that were made here, by value, what ran when, how much has left
      on ways within loops, and lines that a person should read.
    """
    self._host.number, self._host.count = number, count
    self._host.forget(ended)
    given = [serialize.unpack(x) for x in leaves]
    made = self._host.begin(name, step, given, left)
    self._host.wait()
    spans = self._host.timeline.take()
    if not self._host.leads:
      return {}, [], {}, notices.take()
    outputs = {v: serialize.pack(x) for v, x in made.result().items()}
    return outputs, spans, dict(self._host.sent), notices.take()

  @ray.method(concurrency_group='mail')
  def deliver(self, life: int, way: base.Channel, number: int, packed):
    """Takes a value that another place has sent."""
    if life != self._host.life:
      return  # It was sent before a failure, and is nobody's.
    # Who takes over a place does not know how much has gone before.
    want = self._next.get(way, number if self._adopted else 0)
    if number < want and way.source in self._revived:
      return  # It had come before its sender was lost.
    if number != want:
      self._host.fail(
        RuntimeError(
          f'Value {way.value} from {way.source!r} to {way.target!r} came out '
          f'of order: number {number}, not {want}.'
        )
      )
      return
    if isinstance(packed, channel.Offer):
      try:
        packed = self._host.pull(way, packed)
      except Exception as error:  # noqa: BLE001 (whoever waits must know)
        if life == self._host.life:
          self._host.fail(error)
        return
    if life != self._host.life:
      return  # A state was loaded meanwhile.
    self._next[way] = want + 1
    self._host.mail.put(way, packed)

  @ray.method(concurrency_group='control')
  def pulled(self, number: int):
    """Hears that what it has offered was fetched, and may be overwritten."""
    self._host.links.pulled(number)

  @ray.method(concurrency_group='control')
  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes sent to other places, and seconds that took, by the two ends."""
    far = self._host
    return {ends: (far.bytes[ends], far.seconds[ends]) for ends in far.bytes}

  @ray.method(concurrency_group='control')
  def fail(self, why: str):
    """Stops what runs here: something failed elsewhere."""
    self._host.fail(RuntimeError(why))
