"""What an actor is made of: a host whose other places are actors."""

from collections.abc import Mapping, Sequence
import threading
import time
from typing import Any

import jax
import ray

from rlinf_jax.runtime import base, host
from rlinf_jax.runtime.ray import channel
from rlinf_jax.runtime.ray import send_log as send_log_lib
from sharding import span


class RemoteHost(host.Host):
  """A host whose other places are actors.

  Where its own place is of several processes, all of them run the same program;
  what leaves the place is made whole by all, and sent by the first.

  Attributes:
    peers: actors by place, one for each of its processes.
    near: places whose memory this one can share.
    sent: how many values have left, by way within a loop.
    retained: those of them that another may need again.
    life: how often a state was loaded.
    number: of the turn, since then.
    count: of turns of the same flow before it.
    bytes: that have left, by place and target.
    seconds: that took, likewise.
  """

  def __init__(self, leads, replaceable, axes, *args, **kwargs):
    """As `host.Host`, and more.

    Args:
      leads: whether this process speaks for its place.
      replaceable: places that others can take over.
      axes: of the mesh of every place that has them in one process.
      *args: as `host.Host`.
      **kwargs: likewise.
    """
    super().__init__(*args, **kwargs)
    self.leads, self._axes = leads, axes
    self.links = channel.Channels(ray.util.get_node_ip_address())
    self.peers, self.near = {}, frozenset()
    self.sent, self.life, self.number, self.count = {}, 0, 0, 0
    self.retained = send_log_lib.SendLog(replaceable)
    self._posting = threading.Lock()
    self.bytes, self.seconds = {}, {}

  def give(self, turn, v, x):
    super().give(turn, v, span.whole(x))

  def post(self, way, x):
    number = self.count  # Outside of loops a way has one value a turn.
    if way.loop:
      number = self.sent.get(way, 0)
      self.sent[way] = number + 1
    start = time.perf_counter()
    own, x = x, span.whole(x)
    if not self.leads:
      return
    source, target = (self._axes[end] for end in (way.source, way.target))
    axes = source if source == target else ()
    with self._posting:
      readers, near = self.peers[way.target], way.target in self.near
      packed = self.links.pack(x, axes, near, len(readers) > 1, own)
      sent = self.retained.keep(way, self.number, number, packed)
      if len(readers) > 1:  # On one machine they share what is there once.
        sent = ray.put(packed)
      for reader in readers:
        reader.deliver.remote(self.life, way, number, sent)
    ends = way.source, way.target
    spent = time.perf_counter() - start
    self.bytes[ends] = self.bytes.get(ends, 0) + channel.size(packed)
    self.seconds[ends] = self.seconds.get(ends, 0.0) + spent

  def repost(self, place: str, actors: Sequence[Any], turn: int):
    """Sends what a place needs to take a turn again to who took it over."""
    with self._posting:
      self.peers[place] = actors
      for way, number, packed in self.retained.to(place, turn):
        for actor in actors:
          actor.deliver.remote(self.life, way, number, packed)

  def forget(self, ended: Mapping[str, int]):
    """Forgets what nobody will need again; as `SendLog.forget`."""
    with self._posting:
      self.retained.forget(ended)

  def absorb(self, carried: Mapping[int, base.Channel]):
    """Has carried values, by their numbers, be what comes on some ways."""
    (worker,) = self.interpreters.values()
    flow = self.lowered['step'].flow
    ways = dict.fromkeys(carried.values())
    came = {way: self.mail.get(way, self.receive_timeout) for way in ways}
    for i, way in carried.items():
      value = flow.values[flow.carry[i][0]]  # As a step begins with it.
      worker.state[i] = self.place_for(came[way], value, way.target)

  def settle(self, arrays):
    if not self.links.settle(arrays, self.receive_timeout):
      raise RuntimeError(
        f'A value about to be overwritten was not fetched within '
        f'{self.receive_timeout:g} s by the place that it was sent to: that '
        'place hangs, or takes longer than `receive_timeout` allows.'
      )
    if self.failure:
      raise self.failure

  def fail(self, error, turn=None):
    super().fail(error, turn)
    self.links.forget()  # Who would have pulled it is no more.

  def load(self, leaves):
    super().load(leaves)
    self.links.forget()

  def pull(self, way: base.Channel, offer: channel.Offer) -> jax.Array:
    """Fetches a value as soon as it is offered, and says that it has it."""
    flow = self.lowered[way.flow].flow
    for node in way.loop:
      flow = flow.nodes[node].body
    layout = self.places[way.target].layout(flow.values[way.value])
    x = jax.block_until_ready(self.links.unpack(offer, layout))
    self.peers[way.source][0].pulled.remote(offer.number)
    return x

  def place_for(self, x, value, target):
    if isinstance(x, jax.Array):
      return x
    return self.links.unpack(x, self.places[target].layout_at_rest(value))
