"""A process of a place, as a Ray actor.

It records the same flow as the driver, from the same recipe, and runs its own
program of it. The driver only announces calls; values go from actor to actor.
`actor_pool` starts actors.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import dataclasses
import os
import pathlib
from typing import Any, NamedTuple

import jax
import ray

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import recovery
from rlinf_jax.runtime import base, programs
from rlinf_jax.runtime.places import lease as lease_lib
from rlinf_jax.runtime.places import place as place_lib
from rlinf_jax.runtime.ray import remote_executor
from rlinf_jax.runtime.ray.transport import channel, network, serialize
from rlinf_jax.state import state_readers
from rlinf_jax.system import allocator, notices
from sharding import rules as rules_lib

# Threads per concurrency group. Calls of flows block; deliveries may block in a
# pull, and files in writing; control must get through meanwhile.
GROUPS = dict.fromkeys(
  ('calls', 'delivery', 'acknowledgment', 'control', 'files'), 1
)
Flows = Callable[[], tuple[graph.Flow, graph.Flow | None]]
JOIN_TIMEOUT = 120  # Seconds for processes of a place to find each other,
SHUTDOWN_TIMEOUT = 2  # and to part.


class Process(NamedTuple):
  """One of the processes of a place.

  Attributes:
    place: its name.
    rank: number of the process; the one of rank 0 sends and answers for all.
    count: number of processes of the place.
  """

  place: str
  rank: int
  count: int

  def __str__(self):
    """The place, or 'learner 1/2' if it has several processes."""
    if self.count == 1:
      return self.place
    return f'{self.place} {self.rank + 1}/{self.count}'


def replaceable(
  plan: plan_lib.Plan, lowered: Mapping[str, programs.Lowered]
) -> dict[str, frozenset[int]]:
  """Places whose process can be replaced in the middle of a step.

  Returns:
    For each such place, the values of a step that it receives in order to carry
    them into the next one.
  """
  found = {}
  for name, place in plan.places.items():
    received = carried_copies(lowered['step'], name)
    alone = place.processes == 1 and name not in plan.shared_devices
    if alone and received is not None:
      found[name] = frozenset(op.value for op in received.values() if op)
  return found


def carried_copies(step: programs.Lowered, place: str):
  """Receives of the values that a place carries; as `recovery.copies`."""
  carried = {
    start
    for (start, _), places in zip(step.flow.carry, step.resident, strict=True)
    if place in places
  }
  return recovery.copies(step.flow, step.programs[place], carried)


class Actor:
  """One process of a place.

  Ray runs its methods in five groups, each in order on a thread of its own:
  'calls' (which block until the flow is done here), 'delivery' (of values),
  'acknowledgment' (of those that this process has sent), 'files' (which are
  written while calls go on) and 'control' (which must get through meanwhile).
  """

  def __init__(self):
    # Made by `prepare`, as a method can report an error in words.
    self._executor = None
    self._expected: dict[base.Channel, int] = {}  # The next sequence numbers.
    self._replaced: set[str] = set()  # Places whose duplicates are dropped.
    self._is_replacement = False
    self._finish_writing: Callable[[], None] = lambda: None

  @ray.method(concurrency_group='control')
  def address(self, interface: str | None) -> str:
    """A free address for the coordinator of `jax.distributed` of this place.

    Args:
      interface: on which processes listen, as `network.address`.
    """
    address = network.address(interface)
    return network.with_port(address, network.free_port(address))

  @ray.method(concurrency_group='control')
  def join(self, address: str, process: Process, interface: str | None):
    """Initializes `jax.distributed` for the processes of a place.

    JAX must not have started its backend.

    Args:
      address: of the first process.
      process: which of them this is.
      interface: on which it listens, as `network.address`.
    """
    network.bind_cpu_collectives(network.address(interface))
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    # The service would catch SIGTERM, and the process could not be ended.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
      coordinator_address=address,
      coordinator_bind_address=address,  # By default, every interface.
      num_processes=process.count,
      process_id=process.rank,
      initialization_timeout=JOIN_TIMEOUT,
      shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
    )

  @ray.method(concurrency_group='control')
  def prepare(
    self,
    process: Process,
    plan: str,
    flows: Flows,
    expected: str,
    folder: str,
    receive_timeout: float | None,
    lease_folder: str,
    interface: str | None,
  ):
    """Records the flows and makes the place ready.

    Args:
      process: which of the plan's processes this is.
      plan: as JSON.
      flows: records those of a step and of an evaluation.
      expected: the driver's `programs.fingerprint`.
      folder: the driver's working directory, entered if it exists here.
      receive_timeout: seconds to wait for a value; None for no limit.
      lease_folder: where places that share devices queue for them.
      interface: on which it listens, as `network.address`.

    Raises:
      ValueError: if it has recorded something else than the driver, or there
        is no such interface.
    """
    allocator.retain_freed_memory()
    allocator.claim_accelerators()
    notices.start_buffering()
    if os.path.isdir(folder):
      os.chdir(folder)
    name, parsed = process.place, plan_lib.Plan.from_json(plan)
    lowered = programs.lower(parsed, *flows())
    if programs.fingerprint(lowered) != expected:
      raise ValueError(
        f'Place {name!r} has recorded another step than the driver: do both '
        'have the same code, recipe and packages?'
      )
    # Ray has given it devices of its own, which it numbers from zero.
    placement = parsed.places[name]
    own = dataclasses.replace(
      placement, devices=tuple(range(len(placement.devices)))
    )
    lease = lease_lib.of_plan(parsed, lease_folder, [name]).get(name)
    place = place_lib.Place(
      name,
      own,
      parsed.micro_batch,
      rules_lib.DEFAULT,
      lease,
      remat=parsed.remat,
      compiler_options=parsed.compiler_options,
    )
    self._executor = remote_executor.RemoteExecutor(
      process.rank == 0,
      replaceable(parsed, lowered),
      interface,
      lowered,
      {name: place},
      receive_timeout,
    )

  @ray.method(concurrency_group='control')
  def connect(self, peers: Mapping[str, Sequence[Any]], same_machine: Set[str]):
    """Stores the actors of all places, and which places share this memory."""
    self._executor.peers, self._executor.same_machine = (
      dict(peers),
      same_machine,
    )

  @ray.method(concurrency_group='control')
  def describe(self) -> dict[str, Any]:
    """The id, node and device of this process, and its timeline's epoch."""
    device = jax.local_devices()[0]
    return {
      'pid': os.getpid(),
      'node': ray.get_runtime_context().get_node_id(),
      'device': device.device_kind,
      'platform': device.platform,
      'epoch': self._executor.timeline.epoch,
    }

  @ray.method(concurrency_group='calls')
  def load(
    self,
    generation: int,
    sent: Mapping[base.Channel, int] | None,
    state: state_readers.StateReader,
  ):
    """Reads the carried values of this process, and discards those in transit.

    Args:
      generation: how often the driver has loaded a state.
      sent: how many values the process that this one replaces had sent, by
        channel within a loop; None if it is not a replacement.
      state: reads the state.
    """
    executor = self._executor
    executor.generation = -1  # Drops deliveries until the state is loaded.
    self._expected.clear()
    self._replaced.clear()
    self._is_replacement = sent is not None
    executor.sent = dict(sent or {})
    executor.send_log.clear()
    executor.read_state(state)
    executor.generation = generation

  @ray.method(concurrency_group='control')
  def check_resend(self, place: str, call: int):
    """Raises LookupError if `resend` would; sends nothing."""
    self._executor.check_resend(place, call)

  @ray.method(concurrency_group='control')
  def resend(
    self, place: str, actors: Sequence[Any], call: int
  ) -> dict[base.Channel, int]:
    """Sends a replacement of a dead process the values that it needs.

    Args:
      place: whose process died.
      actors: its replacement.
      call: the first that the replacement executes.

    Returns:
      How many values of the dead process have arrived here, by channel.
    """
    self._replaced.add(place)
    self._executor.resend(place, actors, call)
    expected = dict(self._expected)  # The delivery thread may change it.
    return {to: n for to, n in expected.items() if to.source == place}

  @ray.method(concurrency_group='calls')
  def receive_carry(self, carried: Mapping[int, base.Channel]):
    """Receives carried values from their senders, by number in the carry."""
    try:
      self._executor.receive_carry(carried)
    except Exception as error:  # noqa: BLE001 (the next call must report it)
      self._executor.fail(error)

  @ray.method(concurrency_group='calls')
  def checksums(self) -> dict[str, int]:
    """As `Runtime.checksums`, of the values that this process owns."""
    return self._executor.checksums()

  @ray.method(concurrency_group='calls')
  def start_writing(self, folder: pathlib.Path):
    """Starts to write the carried values that this process owns."""
    self._finish_writing = lambda: None  # Until it has started.
    self._finish_writing = self._executor.start_writing(folder)

  @ray.method(concurrency_group='files')
  def finish_writing(self):
    """Blocks until what `start_writing` began to write is written."""
    self._finish_writing()

  @ray.method(concurrency_group='control')
  def compile(self, name: str):
    """Starts compiling the stages of a flow that this process runs."""
    self._executor.compile(name)

  @ray.method(concurrency_group='calls')
  def call(
    self,
    flow: str,
    step: int,
    inputs: Sequence[serialize.Serialized],
    number: int,
    flow_call: int,
    finished: Mapping[str, int],
    remaining: recovery.Left = recovery.EVERYTHING,
  ):
    """Executes one call of a flow; returns when this process has finished it.

    Args:
      flow: its name.
      step: number of the update.
      inputs: of the flow.
      number: of the call, since a state was loaded.
      flow_call: number of the call among those of the same flow.
      finished: how many calls each place has finished for sure.
      remaining: the instructions left to execute, if this process replaces
        one that had begun the call.

    Returns:
      Outputs that were made here, by value; spans of the timeline; how many
      values were sent, by channel within a loop; lines for people.
    """
    self._executor.call, self._executor.flow_call = number, flow_call
    self._executor.truncate_log(finished)
    leaves = [serialize.unpack(x) for x in inputs]
    outputs = self._executor.submit_flow(flow, step, leaves, remaining)
    self._executor.wait()
    spans = self._executor.timeline.take()
    if not self._executor.is_leader:
      return {}, [], {}, notices.drain()
    packed = {v: serialize.pack(x) for v, x in outputs.result().items()}
    return packed, spans, dict(self._executor.sent), notices.drain()

  @ray.method(concurrency_group='acknowledgment')
  def delivered(self):
    """Returns when the values of all answered calls have arrived."""
    self._executor.wait_until_delivered()

  @ray.method(concurrency_group='delivery')
  def deliver(self, generation: int, to: base.Channel, sequence: int, packed):
    """Receives a value from another place.

    Values of a channel must come in order. Those of an earlier generation, and
    those that a replacement sends again, are dropped.

    Args:
      generation: of the sender.
      to: the channel.
      sequence: number of the value in the channel.
      packed: as `Channels.pack`.
    """
    if generation != self._executor.generation:
      return  # It was sent before a failure.
    # A replacement does not know how much its predecessor had received.
    expected = self._expected.get(to, sequence if self._is_replacement else 0)
    if sequence < expected and to.source in self._replaced:
      return  # It had arrived before its sender was replaced.
    if sequence != expected:
      self._executor.fail(
        RuntimeError(
          f'Value {to.value} from {to.source!r} to {to.target!r} came out of '
          f'order: number {sequence}, not {expected}.'
        )
      )
      return
    if isinstance(packed, channel.Offer):
      try:
        packed = self._executor.pull(to, packed)
      except Exception as error:  # noqa: BLE001 (the receiver must be woken)
        if generation == self._executor.generation:
          self._executor.fail(error)
        return
    if generation != self._executor.generation:
      return  # A state was loaded meanwhile.
    self._expected[to] = expected + 1
    self._executor.mailbox.put(to, packed)

  @ray.method(concurrency_group='control')
  def moved(self) -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes sent to other places, and seconds taken, by source and target."""
    executor = self._executor
    return {
      ends: (executor.bytes[ends], executor.seconds[ends])
      for ends in executor.bytes
    }

  @ray.method(concurrency_group='control')
  def fail(self, reason: str):
    """Stops what runs here, because something failed elsewhere."""
    self._executor.fail(RuntimeError(reason))
