"""Models the peak memory of the devices of a place."""

from collections.abc import Mapping

from planner.costs.measured import Estimate
from planner.costs.mesh import (
  call_memory,
  cut_values,
  liveness,
  place_values,
  slices,
)
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import offloading, passes, program, rounding


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
    self._beside, self._cuts, self._orders = {}, {}, {}

  def parts(
    self,
    flow: graph.Flow,
    chosen: plan_lib.Plan,
    place: str,
    stage: str | None = None,
  ) -> tuple[str, dict[str, Estimate]]:
    """Finds the stage with the peak memory, and the components of the peak.

    Args:
      flow: as recorded.
      chosen: the plan.
      place: name of the place.
      stage: the stage of that place to explain; None for that with the peak.

    Returns:
      The stage, and bytes by component.
    """
    nodes = self._nodes(flow, chosen, place)
    nodes = [pair for pair in nodes if stage in (None, pair[0])]
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
    held = program.homes(step, chosen)
    resident = {starts[v]: places for v, places in held.items()}
    rounded = rounding.held(
      evaluation,
      chosen,
      resident,
      rounding.carried_dtypes(step, rounding.held(step, chosen, held)),
    )[place]
    values = place_values.PlaceValues(
      evaluation,
      place,
      program.locate(evaluation, chosen),
      resident,
      self._precedence(evaluation, chosen, in_pieces=False),
      hosted=lambda offload: {
        starts[v] for v in offloading.private(step, offload)
      },
      rounded=rounded,
    )
    axes, found = chosen.places[place].axes, {}
    for node, parts in self._largest(evaluation, values, chosen.offload, axes):
      if node is not None:
        execution = chosen.execution(node.name)
        # It is not cut into pieces.
        own = self._within(evaluation, node, axes, execution, 1, rounded)
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
      pieces, rounded = chosen.pieces, values.rounded
      own = self._within(flow, node, axes, execution, pieces, rounded)
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

  def _values(self, flow, chosen, place) -> place_values.PlaceValues:
    """Returns the values of a place, memoized by the stages of all places."""
    key = id(flow), tuple(chosen.stages.items()), tuple(chosen.places)
    if key not in self._places:
      where_and_homes = homes(flow, chosen)
      held = rounding.held(flow, chosen, where_and_homes[1])
      self._places[key] = flow, where_and_homes, held, {}
    _, where_and_homes, held, places = self._places[key]
    in_pieces, twice = chosen.pieces > 1, frozenset()
    if in_pieces:
      stages = (name for name, here in chosen.stages.items() if here == place)
      twice = self._cut(flow, chosen.pieces).at(frozenset(stages))
    key = place, in_pieces, twice
    if key not in places:
      precedence = self._precedence(flow, chosen, in_pieces)
      places[key] = place_values.PlaceValues(
        flow,
        place,
        *where_and_homes,
        precedence,
        twice,
        rounded=held[place],
      )
    return places[key]

  def rounded(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> Mapping[int, int]:
    """Returns what a place holds in place of values, as `rounding.held`."""
    return self._values(flow, chosen, place).rounded

  def alive(
    self, flow: graph.Flow, chosen: plan_lib.Plan, place: str
  ) -> dict[int, list[int]]:
    """Returns the values on a place's devices during each of its nodes.

    The arguments are those of `parts`. Values that are there twice are in a
    list twice.
    """
    values, offload = self._values(flow, chosen, place), chosen.offload
    stay = values.carried - values.away(offload)
    nodes = zip(values.restored(offload), values.between(offload), strict=True)
    return {
      i: [*(stay | back), *between]
      for i, (back, between) in zip(values.here, nodes, strict=True)
    }

  def _cut(self, flow, pieces: int) -> cut_values.CutValues:
    """Returns the values that are split or joined, memoized."""
    key = id(flow), pieces
    if key not in self._cuts:
      self._cuts[key] = flow, cut_values.CutValues(flow, pieces)
    return self._cuts[key][1]

  def _precedence(self, flow, chosen, in_pieces) -> liveness.Precedence:
    """Returns which calls certainly end before others begin, memoized."""
    key = id(flow), not passes.has_choice(flow, chosen), in_pieces
    if key not in self._orders:
      self._orders[key] = flow, liveness.Precedence(flow, *key[1:])
    return self._orders[key][1]

  def _within(
    self, flow, node, axes, execution, pieces, rounded
  ) -> Mapping[str, Estimate]:
    """Returns the bytes that a stage itself needs, memoized."""
    node = flow.alike(node)
    some = tuple((v, w) for v, w in node.rounded if rounded.get(v) == w)
    key = id(node), axes, execution, pieces, some
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
        dict(some),
      )
      # With the node, so that no other node gets its id.
      self._needs[key] = node, found
    return self._needs[key][1]

  def least(self, flow, node, axes, execution, pieces) -> float:
    """Returns a part of `needs` that does not depend on other stages.

    Values that earlier nodes make are left out, as some take over the memory of
    a carried value. What the stage rounds may be held rounded.
    """
    key, rounded = (id(node), axes), dict(node.rounded)
    if key not in self._reads:
      given = {*flow.inputs, *(start for start, _ in flow.carry)}
      for pairs in offloading.streamed(flow, [node.name]).values():
        given -= pairs.keys()  # A plan may leave them in host memory.
      self._reads[key] = sum(
        self.layout.local(flow.values[rounded.get(v, v)], axes)
        for v in given.intersection(node.reads)
      )
    own = self._within(flow, node, axes, execution, pieces, rounded)
    return self._reads[key] + _total(own)


def _total(parts: Mapping[str, Estimate]) -> float:
  return sum(number.value for number in parts.values())


def homes(flow: graph.Flow, chosen: plan_lib.Plan):
  """Returns the place of every node and the places of every carried value."""
  return program.locate(flow, chosen), program.homes(flow, chosen)
