"""An executor whose other places are actors in other processes."""

import collections
from collections.abc import Mapping, Sequence
import threading
import time
from typing import Any

import jax
import ray

from rlinf_jax.runtime import base, executor
from rlinf_jax.runtime.ray import send_log as send_log_lib
from rlinf_jax.runtime.ray.transport import channel, network
from sharding import multihost


class RemoteExecutor(executor.Executor):
  """Runs one place, or one process's share of it, among actors.

  If its place spans several processes, all of them run the same program. A
  value that leaves the place is gathered by all of them, and sent by the first.

  Values of a channel carry sequence numbers. Outside of loops that is the
  number of the call of the flow, as there is one value per call; within loops
  values are counted. The receiver checks the order and drops duplicates.

  Attributes:
    is_leader: whether this is the first process of its place.
    peers: actors by place, one for each of its processes.
    same_machine: places whose memory this one can share.
    sent: how many values were sent, by channel within a loop.
    send_log: those of them that a replacement may need.
    generation: how often a state was loaded; values of another generation are
      dropped by their receiver.
    call: number of the call, since then.
    flow_call: number of the call among those of the same flow.
    bytes: sent, by source and target.
    seconds: that sending took, likewise.
  """

  def __init__(self, is_leader, replaceable, interface, *args, **kwargs):
    """Computes nothing, and opens no port.

    Args:
      is_leader: whether this is the first process of its place.
      replaceable: places that can be replaced, as `SendLog`.
      interface: on which it listens, as `network.address`.
      *args: as `executor.Executor`.
      **kwargs: likewise.
    """
    super().__init__(*args, **kwargs)
    self.is_leader = is_leader
    self.channels = channel.Channels(network.address(interface))
    self.peers, self.same_machine = {}, frozenset()
    self.sent, self.generation, self.call, self.flow_call = {}, 0, 0, 0
    self.send_log = send_log_lib.SendLog(replaceable)
    self._send_lock = threading.Lock()
    self._deliveries = []
    self.bytes, self.seconds = {}, {}

  def put_output(self, call, v, x):
    super().put_output(call, v, multihost.gather(x))

  def send_remote(self, to, x):
    sequence = self.flow_call
    if to.loop:
      sequence = self.sent.get(to, 0)
      self.sent[to] = sequence + 1
    start = time.perf_counter()
    sharded, x = x, multihost.gather(x)
    if not self.is_leader:
      return
    with self._send_lock:
      readers = self.peers[to.target]
      several, near = len(readers) > 1, to.target in self.same_machine
      packed = self.channels.pack(x, near, several, sharded)
      sent = self.send_log.append(to, self.call, sequence, packed)
      if several:  # Readers on one machine share one copy.
        sent = ray.put(packed)
      self._deliveries += [
        reader.deliver.remote(self.generation, to, sequence, sent)
        for reader in readers
      ]
    ends = to.source, to.target
    spent = time.perf_counter() - start
    self.bytes[ends] = self.bytes.get(ends, 0) + channel.size(packed)
    self.seconds[ends] = self.seconds.get(ends, 0.0) + spent

  def wait_until_delivered(self):
    """Blocks until what was sent so far has arrived, or its receiver died."""
    with self._send_lock:
      deliveries, self._deliveries = self._deliveries, []
    if deliveries:
      ray.wait(deliveries, num_returns=len(deliveries), fetch_local=False)

  def resend(self, place: str, actors: Sequence[Any], call: int):
    """Sends the replacement of a place what it needs from a call on."""
    with self._send_lock:
      self.peers[place] = actors
      for to, sequence, packed in self.send_log.replay(place, call):
        for actor in actors:
          actor.deliver.remote(self.generation, to, sequence, packed)

  def check_resend(self, place: str, call: int):
    """Raises LookupError if `resend` could not send all again."""
    with self._send_lock:
      collections.deque(self.send_log.replay(place, call), maxlen=0)

  def truncate_log(self, finished: Mapping[str, int]):
    """As `SendLog.truncate`."""
    with self._send_lock:
      self.send_log.truncate(finished)

  def receive_carry(self, carried: Mapping[int, base.Channel]):
    """Receives carried values, instead of loading them.

    Args:
      carried: the channel of each, by its number in the carry.
    """
    (interpreter,) = self.interpreters.values()
    flow = self.lowered['step'].flow
    received = {
      to: self.mailbox.get(to, self.receive_timeout)
      for to in dict.fromkeys(carried.values())
    }
    for i, to in carried.items():
      value = flow.values[flow.carry[i][0]]  # Its layout as a step begins.
      interpreter.state[i] = self.lay_out(received[to], value, to.target)

  def wait_until_read(self, arrays):
    if not self.channels.wait_until_pulled(arrays, self.receive_timeout):
      raise RuntimeError(
        'A value about to be overwritten was not fetched within '
        f'{self.receive_timeout:g} s by the place that it was sent to: that '
        'place hangs, or takes longer than `receive_timeout` allows.'
      )
    if self.failure:
      raise self.failure

  def fail(self, error, call=None):
    super().fail(error, call)
    self.channels.cancel_offers()  # Their receivers stop, too.

  def read_state(self, state):
    super().read_state(state)
    self.channels.cancel_offers()

  def pull(self, to: base.Channel, offer: channel.Offer) -> jax.Array:
    """Pulls an offered value; its sender may overwrite it from then on."""
    flow = self.lowered[to.flow].body(to.loop)
    # The place may not hold the devices that it shares.
    layout = self.places[to.target].layout_at_rest(flow.values[to.value])
    return jax.block_until_ready(self.channels.unpack(offer, layout))

  def lay_out(self, x, value, target):
    if isinstance(x, jax.Array):
      return x
    return self.channels.unpack(x, self.places[target].layout_at_rest(value))
