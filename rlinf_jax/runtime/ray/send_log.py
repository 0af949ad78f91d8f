"""What was sent to a place that may be lost, for who takes it over."""

import collections
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import ray

from rlinf_jax.runtime import base
from rlinf_jax.runtime.ray import channel, serialize


class Sent(NamedTuple):
  """A value that has left.

  Attributes:
    turn: in which it did.
    number: of the value on its way.
    packed: the value, or a reference to it in Ray's store; None if it is not
      had any more.
  """

  turn: int
  number: int
  packed: Any


class SendLog:
  """Values that others would need again, until it is known that they do not.

  Of what a place carries from step to step the last is kept, as that place
  begins its next step with it.

  Attributes:
    places: those that can be taken over, and which values they carry.
  """

  def __init__(self, places: Mapping[str, Set[int]]):
    """Keeps nothing yet."""
    self.places = places
    self._sent = collections.defaultdict(collections.deque)

  def keep(self, way: base.Channel, turn: int, number: int, packed) -> Any:
    """Keeps a value on its way; returns what to send of it."""
    if way.target not in self.places:
      return packed
    kept = packed
    if isinstance(packed, channel.Offer):
      kept = None  # It can be pulled once.
    elif channel.size(packed) >= channel.SMALL:
      packed = kept = ray.put(packed)
    elif isinstance(packed, serialize.Serialized):
      # Its memory may be that of an array which a step overwrites.
      kept = packed._replace(data=np.array(packed.data))
    self._sent[way].append(Sent(turn, number, kept))
    return packed

  def forget(self, ended: Mapping[str, int]):
    """Forgets what nobody will need.

    Args:
      ended: by place, the first turn that it may not have ended.
    """
    for way, sent in self._sent.items():
      # The last of a turn that has ended may be what the next begins with.
      while len(sent) > 1 and sent[1].turn < ended.get(way.target, 0):
        sent.popleft()

  def to(
    self, place: str, turn: int
  ) -> Iterator[tuple[base.Channel, int, Any]]:
    """What a place needs to take a turn again, in the order of every way.

    Raises:
      LookupError: if something is not had any more.
    """
    for way, sent in self._sent.items():
      if way.target != place:
        continue
      carried = way.value in self.places[place]
      steps = carried and way.flow == 'step' and not way.loop
      before = [one for one in sent if one.turn < turn]
      again = [one for one in sent if one.turn >= turn]
      for one in (*before[-1:] * steps, *again):
        if one.packed is None:
          raise LookupError(
            f'Value {way.value} was pulled from {way.source!r} by {place!r}, '
            'and can be pulled once.'
          )
        yield way, one.number, one.packed

  def clear(self):
    """Forgets all."""
    self._sent.clear()
