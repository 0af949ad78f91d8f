"""Explains what a plan's remat saves and costs."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from planner import formatting
from planner.ir import graph
from planner.ir import plan as plan_lib


def to_data(
  flow: graph.Flow, model, chosen: plan_lib.Plan
) -> list[dict[str, Any]]:
  """Compares each stage with remat to itself with all activations stored.

  Args:
    flow: as recorded.
    model: the cost model, a `planner.costs.roofline.Roofline`.
    chosen: the plan.

  Returns:
    For each stage with remat its policy, the bytes that it saves on a device,
    and by what fraction its FLOPs grow.
  """
  stored = dataclasses.replace(chosen, remat={})
  found = []
  for name, policy in chosen.remat.items():
    place = chosen.stages[name]
    if not any(node.name == name for node in flow.nodes):
      continue
    less, more = (
      model.memory(flow, plan, place)[name] for plan in (chosen, stored)
    )
    work = model.works[name]
    rows = chosen.micro_batch.get(name) or work.rows / chosen.pieces
    rows /= model.layout.row_ways(chosen.places[place].axes)
    work = work.near(rows)
    flops = work.under(policy).exactly(rows).flops / work.exactly(rows).flops
    found.append(
      {
        'stage': name,
        'policy': policy,
        'saved_bytes': more - less,
        'more_flops': flops - 1,
      }
    )
  return found


def text(entries: list[Mapping[str, Any]]) -> list[str]:
  """Formats these comparisons, a sentence each."""
  return [
    f'{entry["stage"]} with remat {entry["policy"]}: frees '
    f'{formatting.byte_size(entry["saved_bytes"])} a device for '
    f'{100 * entry["more_flops"]:.0f} % more FLOPs.'
    for entry in entries
  ]
