"""Tabulates the values on a place's devices while each of its nodes runs."""

import collections
from collections.abc import Callable, Iterable, Mapping
import functools
import operator
import types

import numpy as np

from planner.costs.mesh import liveness
from planner.ir import graph
from planner.lower import lifetimes, offloading


class PlaceValues:
  """The values that lie on a place's devices while each of its nodes runs.

  A value is on a device from when it is made or received until its last use.
  Later versions of a carried value take over the memory of the old one. A
  batch that passes in pieces counts in full, as pieces pile up before a slow
  stage.

  None of this depends on meshes or micro-batches. A search asks for the memory
  of many of these, so sums of bytes are memoized by mesh.

  Attributes:
    here: indices of the place's nodes.
    carried: carried values that the place holds.
    rounded: what it holds in place of values.
  """

  def __init__(
    self,
    flow: graph.Flow,
    place: str,
    where: list[str],
    homes: dict[int, tuple[str, ...]],
    precedence: liveness.Precedence,
    twice: Iterable[int] = (),
    hosted: Callable[[tuple[str, ...]], Iterable[int]] | None = None,
    rounded: Mapping[int, int] = types.MappingProxyType({}),
  ):
    """Takes a flow and its places.

    Args:
      flow: as recorded.
      place: name of the place.
      where: the place of every node.
      homes: the places of every carried value.
      precedence: which nodes certainly end before others begin.
      twice: values that may be there twice, see `cut_values`.
      hosted: the carried values that are in host memory while unused, by the
        offloaded stages; None if this flow decides that.
      rounded: what the place holds in place of values, as `rounding.held`.
    """
    self.flow, self.rounded = flow, rounded
    self._hosted = hosted or functools.partial(offloading.private, flow)
    self.here = [i for i, name in enumerate(where) if name == place]
    self.carried = {v for v, places in homes.items() if place in places}
    accesses = _accesses(flow, self.here)
    lives = _lives(flow, accesses, self.here, self.carried, precedence)
    changing = [v for v, end in flow.carry if v in self.carried and v != end]
    last = {*flow.outputs, *(end for _, end in flow.carry)}
    # They take over the memory of carried values, or of restored ones.
    self._versions = {
      v: (start, lives.pop(v))
      for v, start in _versions(flow, self.here, changing, precedence).items()
      if v in lives and v not in last
    }
    alike = collections.defaultdict(list)
    for v, during in lives.items():
      alike[during].append(v)
    for v in twice:
      if v in accesses:
        alike[lives.get(v, precedence.during(accesses[v]))].append(v)
    kind, self._kinds = flow.value_kinds
    self._kind = [kind[rounded.get(v, v)] for v in range(len(kind))]
    single = {v: x for v, x in lives.items() if v not in {*twice}}
    lines = self._succession(single, accesses, precedence)
    self._between = [
      _one_of_each(
        (v for during, some in alike.items() if during >> i & 1 for v in some),
        lines,
      )
      for i in self.here
    ]
    self.away = functools.cache(self._away)
    self.streamed = functools.cache(self._streamed)
    self.counts = functools.cache(self._counts)

  def _succession(self, lives, accesses, precedence) -> dict[int, int]:
    """Returns the line of values in which one follows another, by its first.

    A value follows another of its kind that has certainly gone before it is
    made, such as the gradient of the next minibatch. So one of a line is there
    at a time, though each may be there during the same call.
    """
    line_of, latest = {}, collections.defaultdict(list)
    for v in sorted(accesses.keys() & lives, key=lambda v: min(accesses[v])):
      if lives[v] != precedence.during(accesses[v]):
        continue  # It stays until the end.
      since = functools.reduce(
        operator.and_, (precedence.before[i] for i in accesses[v])
      )
      used = sum(1 << i for i in accesses[v])
      lines = latest[self._kind[v]]
      gone = (line for line in lines if not line[1] & ~since)
      if (line := next(gone, None)) is None:
        lines.append(line := [v, used])
      line_of[v], line[1] = line[0], used
    return line_of

  def _away(self, offload: tuple[str, ...]) -> set[int]:
    """Returns carried values that are in host memory while unused."""
    return self.carried.intersection(self._hosted(offload))

  def _streamed(self, offload: tuple[str, ...]) -> dict[int, dict[int, int]]:
    """Returns the values that nodes update in host memory."""
    return offloading.streamed(self.flow, offload)

  def between(self, offload: tuple[str, ...]) -> list[list[int]]:
    """Returns the values that are not carried, for each of the nodes.

    Of a value that is restored for each call, only the first and the last
    version are in host memory while unused, so those between them count from
    the call after their own. Values that are there twice are in a list twice.
    """
    away = self.away(offload)
    hosted = {v for pairs in self.streamed(offload).values() for v in pairs}
    more = [
      (v, during & ~(1 << self.flow.maker[v]))
      for v, (start, during) in self._versions.items()
      if start in away and v not in hosted
    ]
    return [
      values + [v for v, during in more if during >> i & 1]
      for i, values in zip(self.here, self._between, strict=True)
    ]

  def restored(self, offload: tuple[str, ...]) -> list[set[int]]:
    """Returns the values that are restored to the device, for each node."""
    away, streamed = self.away(offload), self.streamed(offload)
    return [
      away.intersection(self.flow.nodes[i].reads).difference(
        streamed.get(i, ())
      )
      for i in self.here
    ]

  def _counts(self, offload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how many values of each kind there are.

    Returns:
      Resident values, [K]; and for each of the nodes, restored values and
      values between stages, [N, K].
    """

    def count(values):
      kinds = [self._kind[v] for v in values]
      return np.bincount(kinds, minlength=len(self._kinds))

    def count_each(lists):
      each = [count(values) for values in lists]
      return np.array(each).reshape(len(each), len(self._kinds))

    return (
      count(self.carried - self.away(offload)),
      count_each(self.restored(offload)),
      count_each(self.between(offload)),
    )

  def sums(self, offload, axes, layout) -> tuple[float, list]:
    """Returns bytes of resident values, and those of each node.

    The latter are pairs: restored values, and values between stages.
    """
    local = np.array([layout.local(value, axes) for value in self._kinds])
    resident, *each = (n @ local for n in self.counts(offload))
    pairs = zip(*(some.tolist() for some in each), strict=True)
    return float(resident), list(pairs)


def _one_of_each(values: Iterable[int], lines: dict[int, int]) -> list[int]:
  """Returns one value of each line, and all values that are in none."""
  found, there = [], set()
  for v in values:
    line = lines.get(v)
    if line is None or line not in there:
      found.append(v)
      there.add(line)
  return found


def _accesses(flow, here) -> dict[int, tuple[int, ...]]:
  """Returns the nodes of a place that read or make each value."""
  found = collections.defaultdict(list)
  for i in here:
    for v in {*flow.nodes[i].reads, *flow.nodes[i].writes}:
      found[v].append(i)
  return {v: tuple(nodes) for v, nodes in found.items()}


def _lives(flow, accesses, here, carried, precedence) -> dict[int, int]:
  """Returns the nodes during which each value that is not carried is there."""
  lives = {
    v: precedence.during(nodes)
    for v, nodes in accesses.items()
    if v not in carried
  }
  made = {v for i in here for v in flow.nodes[i].writes}
  readers = collections.defaultdict(set)  # Of old values that one succeeds.
  for start, finish in flow.carry:
    if start in carried and start != finish:
      readers[finish].update(flow.readers.get(start, ()))
  for finish, nodes in readers.items():
    maker = flow.maker.get(finish)
    late = {
      i for i in nodes if maker is None or not precedence.has_ended(i, maker)
    }
    since = precedence.all if maker is None else precedence.since(maker)
    if finish in made and late <= {maker}:
      lives.pop(finish, None)  # It replaces the old value in memory.
    elif finish in made:
      lives[finish] = since
    elif finish not in carried and late.intersection(here):
      # Another place sends it as soon as it has it, and the old one is in use.
      lives[finish] = since
  for v in flow.outputs:
    if v in lives and v in made:
      lives[v] = precedence.since(flow.maker[v])
  return lives


def _versions(flow, here, starts, precedence) -> dict[int, int]:
  """Returns the later versions of carried values, as `lifetimes.versions`.

  Left out are those that might be made before another node has read the
  version whose memory they take over.
  """
  found = lifetimes.versions(flow, here, starts)
  same = collections.defaultdict(set)
  for v, start in found.items():
    same[start].add(v)

  def is_certain(v, start):
    maker = flow.maker[v]
    return all(
      i == maker
      or precedence.has_ended(i, maker)
      or precedence.has_ended(maker, i)
      for u in (start, *same[start])
      for i in flow.readers.get(u, ())
    )

  return {v: start for v, start in found.items() if is_certain(v, start)}
