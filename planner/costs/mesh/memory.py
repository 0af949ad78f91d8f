"""Models the peak memory of the devices of a place."""

from collections.abc import Callable, Iterable, Mapping
import functools

import numpy as np

from planner.costs.measured import Estimate
from planner.costs.mesh import call_memory, slices
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import lifetimes, offloading, program


class PlaceValues:
  """The values that lie on a place's devices while each of its nodes runs.

  A value is on a device from when it is made or received until its last use.
  Later versions of a carried value take over the memory of the old one. A
  batch that passes in pieces counts in full, as pieces pile up before a slow
  stage.

  None of this depends on meshes, micro-batches or pieces. A search asks for the
  memory of many of these, so sums of bytes are memoized by mesh.

  Attributes:
    here: indices of the place's nodes.
    carried: carried values that the place holds.
  """

  def __init__(
    self,
    flow: graph.Flow,
    place: str,
    where: list[str],
    homes: dict[int, tuple[str, ...]],
    hosted: Callable[[tuple[str, ...]], Iterable[int]] | None = None,
  ):
    """Takes a flow and its places.

    Args:
      flow: as recorded.
      place: name of the place.
      where: the place of every node.
      homes: the places of every carried value.
      hosted: the carried values that are in host memory while unused, by the
        offloaded stages; None if this flow decides that.
    """
    self.flow = flow
    self._hosted = hosted or functools.partial(offloading.private, flow)
    self.here = [i for i, name in enumerate(where) if name == place]
    self.carried = {v for v, places in homes.items() if place in places}
    spans = _spans(flow, self.here, self.carried) if self.here else {}
    changing = [v for v, end in flow.carry if v in self.carried and v != end]
    last = {*flow.outputs, *(end for _, end in flow.carry)}
    # They take over the memory of carried values, or of restored ones.
    self._versions = {
      v: (start, *spans.pop(v))
      for v, start in lifetimes.versions(flow, self.here, changing).items()
      if v in spans and v not in last
    }
    self._between = [
      [v for v, (first, last) in spans.items() if first <= i <= last]
      for i in self.here
    ]
    kinds = {}
    self._kind = [
      kinds.setdefault((v.shape, v.dtype, v.letters), len(kinds))
      for v in flow.values
    ]
    # A value of each kind; those of a kind are equally large on any mesh.
    found = np.unique(self._kind, return_index=True)[1]
    self._kinds = [flow.values[v] for v in found]
    self.away = functools.cache(self._away)
    self.streamed = functools.cache(self._streamed)
    self.counts = functools.cache(self._counts)

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
    the call after their own.
    """
    away = self.away(offload)
    hosted = {v for pairs in self.streamed(offload).values() for v in pairs}
    spans = [
      (v, first + 1, last)
      for v, (start, first, last) in self._versions.items()
      if start in away and v not in hosted
    ]
    return [
      values + [v for v, first, last in spans if first <= i <= last]
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


class MemoryModel:
  """Models the peak memory of any place, memoized.

  A search asks for the memory of many meshes and micro-batches of a place.
  """

  def __init__(
    self,
    works,
    layout,
    platform: str | None = None,
  ):
    """Takes the work of stages and the layout of values.

    Args:
      works: the work of each stage, as `planner.counting.count.of_flow`.
      layout: the layout of values on meshes.
      platform: as in `planner.cluster.Device`.
    """
    self.works, self.layout, self.platform = works, layout, platform
    self._places, self._needs, self._reads = {}, {}, {}
    self._beside = {}

  def parts(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> tuple[str, dict[str, Estimate]]:
    """Finds the stage with the peak memory, and the components of the peak.

    Args:
      flow: as recorded.
      chosen: the plan.
      place: name of the place.

    Returns:
      The stage, and bytes by component.
    """
    nodes = list(self._nodes(flow, chosen, place))
    return max(nodes, key=lambda pair: _total(pair[1]))

  def needs(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> dict[str, float]:
    """Returns the bytes while each node runs, as `cost_model.Model.memory`."""
    found = {}
    for name, parts in self._nodes(flow, chosen, place):
      found[name] = max(found.get(name, 0.0), _total(parts))
    return found

  def of_evaluation(
    self,
    step: graph.Flow,
    evaluation: graph.Flow,
    chosen: plan_lib.Plan,
    place: str,
  ) -> dict[str, float]:
    """Returns the bytes while each node of an evaluation runs, by its name.

    Values that steps carry stay where they are meanwhile.

    Args:
      step: the flow of a step, as recorded.
      evaluation: that of an evaluation, which carries the same values.
      chosen: the plan, with a place for the stages of both.
      place: name of the place.
    """
    starts = {
      one: other
      for (one, _), (other, _) in zip(step.carry, evaluation.carry, strict=True)
    }
    where = program.locate(evaluation, chosen)
    held = program.homes(step, chosen)
    values = PlaceValues(
      evaluation,
      place,
      where,
      {starts[v]: places for v, places in held.items()},
      lambda offload: {starts[v] for v in offloading.private(step, offload)},
    )
    axes, found = chosen.places[place].axes, {}
    for node, parts in self._largest(evaluation, values, chosen.offload, axes):
      if node is not None:
        execution = chosen.execution(node.name)
        # It is not cut into pieces.
        own = self._within(evaluation, node, axes, execution, 1)
        need = _total({**parts, **own})
        found[node.name] = max(found.get(node.name, 0.0), need)
    return found

  def _nodes(self, flow, chosen, place):
    """Yields the name of nodes of a place, and bytes by component.

    Of calls that are alike, the one beside which other values take most memory
    stands for all.
    """
    axes, values = chosen.places[place].axes, self._values(flow, chosen, place)
    key = id(values), chosen.offload, axes
    if key not in self._beside:
      self._beside[key] = self._largest(flow, values, chosen.offload, axes)
    for node, parts in self._beside[key]:
      if node is None:
        yield '', parts
        continue
      execution = chosen.execution(node.name)
      own = self._within(flow, node, axes, execution, chosen.pieces)
      yield node.name, {**parts, **own}

  def _largest(self, flow, values, offload, axes) -> list:
    """Returns a node of each kind, with the bytes of values beside its call.

    A place without nodes has None with those of its carried values.
    """
    resident, sums = values.sums(offload, axes, self.layout)
    found = {'carried values': Estimate(resident, 'modeled')}
    if not values.here:
      return [(None, found)]
    streamed, most = values.streamed(offload), {}
    for i, (back, between) in zip(values.here, sums, strict=True):
      parts = {
        **found,
        'restored values': Estimate(back, 'modeled'),
        'values between stages': Estimate(between, 'modeled'),
        **self.sliced(flow, i, streamed.get(i, {}), axes),
      }
      kind, total = id(flow.alike(flow.nodes[i])), _total(parts)
      if kind not in most or total > most[kind][0]:
        most[kind] = total, flow.nodes[i], parts
    return [(node, parts) for _, node, parts in most.values()]

  def sliced(self, flow, i: int, streamed, axes) -> dict[str, Estimate]:
    """Returns the bytes of slices of values that a node updates elsewhere."""
    if not streamed:
      return {}
    node = flow.nodes[i]
    size = slices.bytes_on_device(
      flow,
      node,
      streamed,
      axes,
      self.works.get(node.name),
      self.layout,
      self.platform,
    )
    return {'slices of offloaded values': Estimate(size, 'modeled')}

  def _values(self, flow, chosen, place) -> PlaceValues:
    """Returns the values of a place, memoized by the stages of all places."""
    key = id(flow), tuple(chosen.stages.items()), tuple(chosen.places)
    if key not in self._places:
      self._places[key] = flow, homes(flow, chosen), {}
    _, where_and_homes, places = self._places[key]
    if place not in places:
      places[place] = PlaceValues(flow, place, *where_and_homes)
    return places[place]

  def _within(
    self, flow, node, axes, execution, pieces
  ) -> Mapping[str, Estimate]:
    """Returns the bytes that a stage itself needs, memoized."""
    node = flow.alike(node)
    key = id(node), axes, execution, pieces
    if key not in self._needs:
      found = call_memory.within(
        flow,
        node,
        axes,
        execution,
        pieces,
        self.works,
        self.layout,
        self.platform,
      )
      # With the node, so that no other node gets its id.
      self._needs[key] = node, found
    return self._needs[key][1]

  def least(self, flow, node, axes, execution, pieces) -> float:
    """Returns a part of `needs` that does not depend on other stages.

    Values that earlier nodes make are left out, as some take over the memory of
    a carried value.
    """
    key = id(node), axes
    if key not in self._reads:
      given = {*flow.inputs, *(start for start, _ in flow.carry)}
      for pairs in offloading.streamed(flow, [node.name]).values():
        given -= pairs.keys()  # A plan may leave them in host memory.
      self._reads[key] = sum(
        self.layout.local(flow.values[v], axes)
        for v in given.intersection(node.reads)
      )
    own = self._within(flow, node, axes, execution, pieces)
    return self._reads[key] + _total(own)


def _total(parts: Mapping[str, Estimate]) -> float:
  return sum(number.value for number in parts.values())


def alive(
  flow: graph.Flow,
  chosen: plan_lib.Plan,
  place: str,
  where: list[str],
  homes: dict[int, tuple[str, ...]],
) -> dict[int, set[int]]:
  """Returns the values that lie on a place's devices during each of its nodes.

  The arguments are those of `PlaceValues`, and the plan.
  """
  values = PlaceValues(flow, place, where, homes)
  offload = chosen.offload
  stay = values.carried - values.away(offload)
  nodes = zip(values.restored(offload), values.between(offload), strict=True)
  return {
    i: stay | back | {*between}
    for i, (back, between) in zip(values.here, nodes, strict=True)
  }


def _spans(flow, here, carried) -> dict[int, tuple[int, int]]:
  """Returns the first and last node of each value that is not carried."""
  spans, end = {}, len(flow.nodes)
  for i in here:
    node = flow.nodes[i]
    for v in (*node.reads, *node.writes):
      if v not in carried:
        first, _ = spans.get(v, (i, i))
        spans[v] = first, i
  made = {v for i in here for v in flow.nodes[i].writes}
  last_read = {}  # Of the old values that a value succeeds.
  for start, finish in flow.carry:
    if start in carried and start != finish:
      last = max(flow.readers.get(start, (-1,)))
      last_read[finish] = max(last, last_read.get(finish, -1))
  for finish, last in last_read.items():
    first = flow.maker.get(finish, -1)
    if finish in made and last <= first:
      spans.pop(finish, None)  # It replaces the old value in memory.
    elif finish in made:
      spans[finish] = spans[finish][0], end
    elif finish not in carried and any(first < i <= last for i in here):
      # Another place sends it as soon as it has it, and the old one is in use.
      spans[finish] = min(first + 1, spans.get(finish, (end,))[0]), end
  for v in flow.outputs:
    if v in spans and v in made:
      spans[v] = spans[v][0], end
  return spans


def homes(flow: graph.Flow, chosen: plan_lib.Plan):
  """Returns the place of every node and the places of every carried value."""
  return program.locate(flow, chosen), program.homes(flow, chosen)
