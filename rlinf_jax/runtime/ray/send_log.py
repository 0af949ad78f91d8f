"""A log of what was sent to places that can be replaced.

If the process of such a place dies, its replacement is sent again what the lost
process had received and still needs.
"""

import collections
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import ray

from rlinf_jax.runtime import base
from rlinf_jax.runtime.ray.transport import channel, serialize


class Entry(NamedTuple):
  """A value that was sent.

  Attributes:
    call: number of the call in which it was sent.
    sequence: number of the value in its channel.
    packed: the value, or a reference to it in Ray's object store; None if it
      cannot be sent again.
  """

  call: int
  sequence: int
  packed: Any


class SendLog:
  """Values that a replacement would need, until they are known to be obsolete.

  A place begins a step with the values that it carries, which it received in an
  earlier one. The log therefore always keeps the last entry of a channel.

  Attributes:
    places: the places that can be replaced, with the values that they carry.
  """

  def __init__(self, places: Mapping[str, Set[int]]):
    """Starts empty."""
    self.places = places
    self._entries = collections.defaultdict(collections.deque)

  def append(self, to: base.Channel, call: int, sequence: int, packed) -> Any:
    """Logs a value; returns it in the form in which it is to be sent."""
    if to.target not in self.places:
      return packed
    kept = packed
    if isinstance(packed, channel.Offer):
      kept = None  # It can be pulled once.
    elif channel.size(packed) >= channel.SMALL:
      packed = kept = ray.put(packed)
    elif isinstance(packed, serialize.Serialized):
      # Copy: it may share the memory of an array that a step overwrites.
      kept = packed._replace(data=np.array(packed.data))
    self._entries[to].append(Entry(call, sequence, kept))
    return packed

  def truncate(self, finished: Mapping[str, int]):
    """Removes entries that no replacement will need.

    Args:
      finished: how many calls each place has finished for sure.
    """
    for to, entries in self._entries.items():
      # The last entry of a finished call may be carried into the next.
      while len(entries) > 1 and entries[1].call < finished.get(to.target, 0):
        entries.popleft()

  def replay(
    self, place: str, call: int
  ) -> Iterator[tuple[base.Channel, int, Any]]:
    """Yields (channel, sequence, value) for a place that executes calls again.

    It includes the values that the place carries into the first call.

    Values of one channel come in the order in which they were sent first.

    Raises:
      LookupError: if one of them cannot be sent again.
    """
    for to, entries in self._entries.items():
      if to.target != place:
        continue
      is_carried = to.value in self.places[place]
      is_carried = is_carried and to.flow == 'step' and not to.loop
      before = [entry for entry in entries if entry.call < call]
      again = [entry for entry in entries if entry.call >= call]
      for entry in (*(before[-1:] if is_carried else ()), *again):
        if entry.packed is None:
          raise LookupError(
            f'Value {to.value} was pulled from {to.source!r} by {place!r}, '
            'and a value can be pulled once.'
          )
        yield to, entry.sequence, entry.packed

  def clear(self):
    """Removes all entries."""
    self._entries.clear()
