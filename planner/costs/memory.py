"""Models the peak memory of the devices of a place."""

from planner.costs import collectives, work
from planner.costs.measured import Estimate
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import program


def parts(
  flow: graph.Flow,
  chosen: plan_lib.Plan,
  place: str,
  where: list[str],
  homes: dict[int, tuple[str, ...]],
  works,
  layout,
) -> tuple[str, dict[str, Estimate]]:
  """Finds the stage with the peak memory, and the components of the peak.

  A value is on a device from when it is made or received until its last use.
  The next version of a carried value takes over the memory of the old one. A
  batch that passes in pieces counts in full, as pieces pile up before a slow
  stage.

  Args:
    flow: as recorded.
    chosen: the plan.
    place: name of the place.
    where: the place of every node.
    homes: the places of every carried value.
    works: the work of each stage, as `planner.counting.count.of_flow`.
    layout: the layout of values on meshes.

  Returns:
    The stage, and bytes by component.
  """
  axes = chosen.places[place].axes
  here = [i for i, name in enumerate(where) if name == place]
  carried = {v for v, places in homes.items() if place in places}
  away = carried.intersection(program.private(flow, chosen.offload))
  resident = sum(layout.local(flow.values[v], axes) for v in carried - away)
  worst = (
    '',
    {
      'carried values': Estimate(resident, 'modeled'),
    },
  )
  if not here:
    return worst
  spans = _spans(flow, here, carried)
  most = -1.0
  for i in here:
    node = flow.nodes[i]
    values = sum(
      layout.local(flow.values[v], axes)
      for v, (first, last) in spans.items()
      if first <= i <= last
    )
    touched = away.intersection(node.reads)
    back = sum(layout.local(flow.values[v], axes) for v in touched)
    found = {
      'carried values': Estimate(resident, 'modeled'),
      'restored values': Estimate(back, 'modeled'),
      'values between stages': Estimate(values, 'modeled'),
      **within(flow, node, chosen, axes, works, layout),
    }
    total = sum(number.value for number in found.values())
    if total > most:
      most, worst = total, (node.name, found)
  return worst


def alive(
  flow: graph.Flow,
  chosen: plan_lib.Plan,
  place: str,
  where: list[str],
  homes: dict[int, tuple[str, ...]],
) -> dict[int, set[int]]:
  """Returns the values that lie on a place's devices during each of its nodes.

  The arguments are those of `parts`, which sums up the bytes of these values.
  """
  here = [i for i, name in enumerate(where) if name == place]
  carried = {v for v, places in homes.items() if place in places}
  away = carried.intersection(program.private(flow, chosen.offload))
  spans = _spans(flow, here, carried)
  return {
    i: (carried - away)
    | away.intersection(flow.nodes[i].reads)
    | {v for v, (first, last) in spans.items() if first <= i <= last}
    for i in here
  }


def within(flow, node, chosen, axes, works, layout) -> dict[str, Estimate]:
  """Returns the bytes that a stage itself needs, by component."""
  call = works.get(node.name)
  if graph.is_plumbing(node) or call is None:
    return {}
  if not isinstance(call, work.StageWork):
    rows = chosen.micro_batch.get(node.name)
    return call.bytes(flow, node, axes, layout, chosen.pieces, rows)
  parameters = collectives.Parameters(flow, node, layout)
  rows = max((flow.values[v].shape[0] for v in node.rows), default=0)
  at_once = chosen.micro_batch.get(node.name) or rows / chosen.pieces
  call = call.near(at_once)
  alive = call.per_row.bytes_alive * at_once / layout.row_ways(axes)
  fixed = call.fixed.bytes_alive * parameters.share(axes)
  matmul = call.fixed.matmul | call.per_row.matmul
  item = max(map(collectives.item_bytes, matmul), default=0)
  gathered = parameters.gathered(axes, item)
  if parameters.gradients:  # A scan gathers one layer ahead.
    gathered *= min(1.0, 2 / parameters.depth)
  made = 0.0
  if (
    at_once < rows and node.stage.grain == 'sum'
  ):  # They are added to the sums so far.
    made = sum(layout.local(flow.values[v], axes) for v in node.writes)
  return {
    'activations': Estimate(alive + fixed, 'modeled'),
    'gathered parameters': Estimate(gathered, 'modeled'),
    'sums of a micro-batch': Estimate(made, 'modeled'),
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
  for start, finish in flow.carry:
    if start in carried and start != finish and finish in made:
      last = max(flow.readers.get(start, (-1,)))
      if last <= flow.maker[finish]:
        spans.pop(finish, None)  # It replaces the old value in memory.
      else:
        spans[finish] = spans[finish][0], end
  for v in flow.outputs:
    if v in spans and v in made:
      spans[v] = spans[v][0], end
  return spans


def homes(flow: graph.Flow, chosen: plan_lib.Plan):
  """Returns the place of every node and the places of every carried value."""
  return program.locate(flow, chosen), program.homes(flow, chosen)
