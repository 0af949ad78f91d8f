"""Groups stages: those that always share a place, and all partitions."""

import collections
from collections.abc import Collection
import itertools

from planner.ir import plan


def partitions(n: int, most: int):
  """Yields the partitions of `n` items into at most `most` sets of bits."""

  def grow(i, blocks):
    if i == n:
      yield blocks
      return
    for b, block in enumerate(blocks):
      yield from grow(i + 1, (*blocks[:b], block | 1 << i, *blocks[b + 1 :]))
    if len(blocks) < most:
      yield from grow(i + 1, (*blocks, 1 << i))

  yield from grow(0, ())


def groups(flow, together) -> list[tuple[str, ...]]:
  """Returns the stages in groups that share a place, in the flow's order.

  Raises:
    ValueError: for stages that the flow does not have, and for no stages.
  """
  if not flow.stages:
    raise ValueError(
      'The flow has no stages, so that no plan can be searched for it: record '
      'a step that calls one stage or more.'
    )
  strange = sorted({s for some in together for s in some} - {*flow.stages})
  if strange:
    raise ValueError(
      f'The space puts {strange} together, which are not among the stages '
      f'{list(flow.stages)} of the flow.'
    )
  leader = {stage: stage for stage in flow.stages}
  for some in together:
    joined = {leader[stage] for stage in some}
    first = next(s for s in flow.stages if leader[s] in joined)
    for stage in flow.stages:
      if leader[stage] in joined:
        leader[stage] = first
  members = collections.defaultdict(list)
  for stage in flow.stages:
    members[leader[stage]].append(stage)
  return [tuple(members[s]) for s in flow.stages if s in members]


def merge_small_stages(
  flow,
  model,
  devices: int,
  share: float = 1e-3,
  most: int | None = None,
  unknown: Collection[str] = (),
):
  """Merges very short stages with the neighbor they exchange most bytes with.

  Stages that reshape, count or shuffle would multiply the number of plans
  without changing their times. A merge must leave a mesh of all devices that
  the group can have. If more than `most` groups remain, the shortest ones are
  merged as well: ten groups have sixteen times as many partitions as eight.

  Args:
    flow: as recorded.
    model: a `cost_model.Model`.
    devices: number of devices.
    share: stages below this share of all stages' seconds are very short.
    most: largest number of groups, as far as merges are possible; None for
      any number.
    unknown: stages whose seconds nothing is known about. They count as very
      short, so that no group has a place for their sake.

  Returns:
    Groups of stages, as `space.Space.colocated`.
  """
  spent = collections.Counter(dict.fromkeys(flow.stages, 0.0))
  for node in flow.nodes:
    if node.name in spent and node.name not in unknown:
      spent[node.name] += _least(flow, model, node, devices)
  bytes_ = collections.Counter()
  for i, node in enumerate(flow.nodes):
    for v in node.reads:
      if v in flow.maker and flow.maker[v] != i:
        pair = frozenset((flow.nodes[flow.maker[v]].name, node.name))
        bytes_[pair] += flow.values[v].bytes
  some = [frozenset([stage]) for stage in flow.stages]
  little = share * sum(spent.values())

  def between(one, other):
    pairs = itertools.product(one, other)
    return sum(bytes_[frozenset(pair)] for pair in pairs)

  def may_join(one, other):
    if not between(one, other):
      return False
    both = tuple(s for s in flow.stages if s in one | other)
    return bool(model.axes(both, devices))

  found = True
  while found:
    found = False
    for one in sorted(some, key=lambda some: sum(spent[s] for s in some)):
      others = [x for x in some if x != one and may_join(one, x)]
      short = sum(spent[s] for s in one) < little
      if others and (short or len(some) > (most or len(some))):
        other = max(others, key=lambda other: between(one, other))
        some = [x for x in some if x not in (one, other)] + [one | other]
        found = True
        break
  joined = [tuple(s for s in flow.stages if s in x) for x in some if len(x) > 1]
  return tuple(sorted(joined, key=lambda stages: flow.stages.index(stages[0])))


def _least(flow, model, node, devices) -> float:
  """Returns the seconds of a call on all devices, or on one if it must."""
  for n in (devices, 1):
    if menu := model.axes((node.name,), n):
      return min(
        model.seconds(flow, node, plan.Placement(tuple(range(n)), axes), None)
        for axes in menu
      )
  return 0.0
