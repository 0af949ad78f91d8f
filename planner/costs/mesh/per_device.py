"""The modeled work of a stage's call on one device, to hold against a compiler.

A compiler sees one call of a stage. What it says of bytes, operations and
communication is compared with these numbers.
"""

from typing import NamedTuple

from planner.costs.mesh import (
  allowed_meshes,
  call_memory,
  collectives,
  memory,
  slices,
)
from planner.costs.work import StageWork
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import offloading


class DeviceCosts(NamedTuple):
  """Modeled costs of a call on each of its devices.

  Attributes:
    memory: peak bytes during the call.
    others: the bytes among them of values that are neither arguments nor
      results of the call. They follow from the plan.
    matmul_flops: operations of matrix products; None where the work depends on
      lengths, and for a stage that was not counted.
    collective_bytes: bytes that a device sends; None likewise.
  """

  memory: float
  others: float
  matmul_flops: float | None
  collective_bytes: float | None


def stage_costs(
  flow: graph.Flow, chosen: plan_lib.Plan, model, name: str, rows: int
) -> DeviceCosts:
  """Returns the modeled costs of a stage's call.

  If a flow calls the stage several times, the call is the one during which most
  memory is in use.

  Args:
    flow: as recorded.
    chosen: the plan.
    model: a `roofline.Roofline` of this flow.
    name: of the stage.
    rows: rows of the call, fewer than recorded where the batch is cut.
  """
  place, layout = chosen.stages[name], model.layout
  axes = chosen.places[place].axes
  peaks = memory.MemoryModel(model.works, layout, model.cluster.device.platform)
  rounded = peaks.rounded(flow, chosen, place)
  held = [flow.values[rounded.get(v, v)] for v in range(len(flow.values))]
  most = DeviceCosts(-1.0, 0.0, None, None)
  for i, some in peaks.alive(flow, chosen, place).items():
    node = flow.nodes[i]
    if node.name != name:
      continue
    values = sum(layout.local(held[v], axes) for v in some)
    streamed = offloading.streamed(flow, chosen.offload).get(i, {})
    own = call_memory.within(
      flow,
      node,
      axes,
      chosen.execution(name),
      chosen.pieces,
      model.works,
      layout,
      model.cluster.device.platform,
      {v: w for v, w in node.rounded if rounded.get(v) == w},
    )
    needed = values + sum(number.value for number in own.values())
    needed += slices.bytes_on_device(
      flow,
      node,
      streamed,
      axes,
      model.works.get(name),
      layout,
      model.cluster.device.platform,
    )
    if needed > most.memory:
      own = _own_bytes(flow, held, node, some, axes, layout, rows)
      most = DeviceCosts(needed, max(0.0, values - own), None, None)
      last = node
  return most._replace(**_work(flow, chosen, model, last, rows))


def _own_bytes(flow, held, node, alive, axes, layout, rows) -> float:
  """Returns the bytes of a call's arguments and results, among some values."""
  there = flow.rows_of(node)
  share = rows / there if there else 1.0
  total = 0.0
  for v in {*node.reads, *node.writes}.intersection(alive):
    value = held[v]
    is_cut = v in node.rows or value.letters[:1] == ('B',)
    total += layout.local(value, axes) * (share if is_cut else 1.0)
  return total


def _work(flow, chosen, model, node, rows) -> dict[str, float]:
  """Returns operations and bytes sent by a device, by field."""
  call = model.works.get(node.name)
  if not isinstance(call, StageWork):
    return {}
  axes = chosen.places[chosen.stages[node.name]].axes
  at_once = chosen.micro_batch.get(node.name) or rows
  turns = rows / at_once if rows else 1
  parameters = collectives.Parameters(flow, node, model.layout)
  ways = parameters.ways(axes)
  own_rows = at_once / allowed_meshes.row_ways(
    model.layout, flow, node, axes, at_once
  )
  call = call.near(own_rows).under(chosen.execution(node.name).remat)
  done = collectives.divided_work(call, own_rows, axes, model.layout)
  whole = call.exactly(own_rows)
  passes = max(1.0, whole.passes)
  sent = sum(
    part.size * part.times(passes, turns)
    for part in collectives.communication(parameters, done, axes, model.cluster)
  )
  flops = turns * whole.matmul_flops / ways
  return {'matmul_flops': flops, 'collective_bytes': sent}
