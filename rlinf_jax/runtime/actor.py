"""A place in a process of its own, which Ray starts.

It records the same flow as the driver, from the same recipe, and runs its own
program of it: nobody tells it what to do next, and values go from actor to
actor. What it is made of is here; how it is started is in `cluster`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import dataclasses
import hashlib
import os
import time
from typing import Any

import jax
import ray

from planner import graph
from planner import plan as plan_lib
from rlinf_jax import memory
from rlinf_jax.runtime import host, link, parcel
from rlinf_jax.runtime import lease as lease_lib
from rlinf_jax.runtime import mail as mail_lib
from rlinf_jax.runtime import place as place_lib
from sharding import rules as rules_lib

GROUPS = {'turns': 1, 'mail': 1, 'control': 1}  # Threads of each.
Flows = Callable[[], tuple[graph.Flow, graph.Flow | None]]


def fingerprint(lowered: Mapping[str, host.Lowered]) -> str:
  """What two processes must agree on to run parts of one step."""
  told = []
  for name, some in sorted(lowered.items()):
    told.append((name, some.programs, some.resident, *_facts(some.flow)))
  return hashlib.sha256(repr(told).encode()).hexdigest()


def _facts(flow):
  values = [(v.name, v.shape, str(v.dtype), v.letters) for v in flow.values]
  nodes = [
    (n.name, n.reads, n.writes, n.piece, n.body and _facts(n.body))
    for n in flow.nodes
  ]
  return values, nodes, flow.inputs, flow.outputs, flow.carry


class _Far(host.Host):
  """A host whose other places are actors.

  Attributes:
    peers: actors by place.
    near: places whose memory this one can share.
    sent: how many values have left, by way.
    life: how often a state was loaded.
    bytes: that have left, by place and target.
    seconds: that took, likewise.
  """

  def __init__(self, axes, *args, **kwargs):
    """As `host.Host`, with the mesh axes of every place of the plan."""
    super().__init__(*args, **kwargs)
    self._axes, self.links = axes, link.Links(ray.util.get_node_ip_address())
    self.peers, self.near = {}, frozenset()
    self.sent, self.life = {}, 0
    self.bytes, self.seconds = {}, {}

  def post(self, way, x):
    number = self.sent.get(way, 0)
    self.sent[way] = number + 1
    start = time.perf_counter()
    source, target = (self._axes[end] for end in (way.source, way.target))
    axes = source if source == target else ()
    packed = self.links.pack(x, axes, way.target in self.near)
    self.peers[way.target].deliver.remote(self.life, way, number, packed)
    ends = way.source, way.target
    spent = time.perf_counter() - start
    self.bytes[ends] = self.bytes.get(ends, 0) + link.size(packed)
    self.seconds[ends] = self.seconds.get(ends, 0.0) + spent

  def place_for(self, x, value, target):
    return self.links.unpack(x, self.places[target].layout_at_rest(value))


class Actor:
  """One place, and its mail.

  Its methods are called in three groups, a thread each: turns, mail, and what
  must get through while a turn waits.
  """

  def __init__(self):
    # What it is made of may be refused, and a method can say so in words.
    self._host = None
    self._next = {}

  @ray.method(concurrency_group='control')
  def prepare(
    self,
    name: str,
    plan: str,
    flows: Flows,
    agreed: str,
    folder: str,
    patience: float | None,
    shared: str,
  ):
    """Records the flows and makes the place ready.

    Args:
      name: of the place.
      plan: as JSON.
      flows: records those of a step and of an evaluation.
      agreed: the driver's `fingerprint`.
      folder: the driver's, if there is one like it here.
      patience: seconds to wait for a value.
      shared: a folder by which places take turns on devices.

    Raises:
      ValueError: if it has recorded something else than the driver.
    """
    memory.keep()
    if os.path.isdir(folder):
      os.chdir(folder)
    chosen = plan_lib.Plan.from_json(plan)
    lowered = host.lower(chosen, *flows())
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
    place = place_lib.Place(name, own, chosen.rows, rules_lib.DEFAULT, lease)
    axes = {name: place.axes for name, place in chosen.places.items()}
    self._host = _Far(axes, lowered, {name: place}, patience)

  @ray.method(concurrency_group='control')
  def meet(self, peers: Mapping[str, Any], near: Set[str]):
    """Makes the other places known, and which share this one's memory."""
    self._host.peers, self._host.near = dict(peers), near

  @ray.method(concurrency_group='control')
  def about(self) -> dict[str, Any]:
    """Where it is: process, node and device."""
    device = jax.devices()[0]
    return {
      'pid': os.getpid(),
      'node': ray.get_runtime_context().get_node_id(),
      'device': device.device_kind,
      'platform': device.platform,
      'epoch': self._host.timeline.epoch,
    }

  @ray.method(concurrency_group='turns')
  def load(self, life: int, numbers: Sequence[int], *leaves: parcel.Parcel):
    """Takes over what is carried; forgets what was on its way.

    Args:
      life: how often the driver has loaded a state.
      numbers: in the carry, of what lives here.
      *leaves: values of that.
    """
    self._next.clear()
    self._host.sent.clear()
    self._host.life = life
    arrays = map(parcel.unpack, leaves)
    self._host.load(dict(zip(numbers, arrays, strict=True)))

  @ray.method(concurrency_group='turns')
  def state(self) -> dict[int, parcel.Parcel]:
    """Carried values whose first home is here."""
    self._host.wait()
    return {i: parcel.pack(x) for i, x in self._host.leaves().items()}

  @ray.method(concurrency_group='control')
  def compile(self, name: str):
    """Begins to make its stages of a flow ready."""
    self._host.compile(name)

  @ray.method(concurrency_group='turns')
  def turn(self, name: str, step: int, leaves):
    """One call of a flow, to its end here.

    Returns:
      Outputs that were made here, by value, and what ran when.
    """
    made = self._host.begin(name, step, [parcel.unpack(x) for x in leaves])
    self._host.wait()
    outputs = {v: parcel.pack(x) for v, x in made.result().items()}
    return outputs, self._host.timeline.take()

  @ray.method(concurrency_group='mail')
  def deliver(self, life: int, way: mail_lib.Way, number: int, packed):
    """Takes a value that another place has sent."""
    if life != self._host.life:
      return  # It was sent before a failure, and is nobody's.
    want = self._next.get(way, 0)
    if number != want:
      self._host.fail(
        RuntimeError(
          f'Value {way.value} from {way.source!r} to {way.target!r} came out '
          f'of order: number {number}, not {want}.'
        )
      )
      return
    self._next[way] = want + 1
    self._host.mail.put(way, packed)

  @ray.method(concurrency_group='control')
  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes sent to other places, and seconds that took, by the two ends."""
    far = self._host
    return {ends: (far.bytes[ends], far.seconds[ends]) for ends in far.bytes}

  @ray.method(concurrency_group='control')
  def fail(self, why: str):
    """Stops what runs here: something failed elsewhere."""
    self._host.fail(RuntimeError(why))
