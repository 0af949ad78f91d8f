"""Explains what a plan keeps in host memory, and what that costs."""

from collections.abc import Mapping
from typing import Any

from planner import formatting
from planner.costs.mesh import slices
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import offloading


def to_data(
  flow: graph.Flow, model, chosen: plan_lib.Plan
) -> list[dict[str, Any]]:
  """Says of each offloaded stage what is in host memory.

  Args:
    flow: as recorded.
    model: the cost model, a `planner.costs.roofline.Roofline`.
    chosen: the plan.

  Returns:
    For each stage the bytes of its values, those of them that its call has on
    the device at a time, and the seconds that moving them takes in a step.
  """
  found = []
  for name in chosen.offload:
    place = chosen.places[chosen.stages[name]]
    own = offloading.private(flow, [name])
    size = {v: model.layout.local(flow.values[v], place.axes) for v in own}
    there = seconds = 0.0
    streamed = offloading.streamed(flow, [name])
    for i, pairs in streamed.items():
      node = flow.nodes[i]
      seconds += sum(
        model.switch(flow, v, place) for pair in pairs.items() for v in pair
      )
      moved = slices.bytes_on_device(
        flow,
        node,
        pairs,
        place.axes,
        model.works.get(name),
        model.layout,
        model.cluster.device.platform,
      )
      there = max(there, moved)
    rest = own.keys() - {v for pairs in streamed.values() for v in pairs}
    seconds += sum(2 * model.switch(flow, v, place) for v in rest)
    found.append(
      {
        'stage': name,
        'bytes': sum(size.values()),
        'bytes_on_device': there + sum(size[v] for v in rest),
        'seconds': seconds,
      }
    )
  return found


def text(entries: list[Mapping[str, Any]]) -> list[str]:
  """Formats what is in host memory, a sentence each."""
  return [
    f'{entry["stage"]} has {formatting.byte_size(entry["bytes"])} a device in '
    f'host memory, and {formatting.byte_size(entry["bytes_on_device"])} of it '
    'on the device at a time; moving it takes '
    f'{formatting.seconds(entry["seconds"])} a step.'
    for entry in entries
  ]
