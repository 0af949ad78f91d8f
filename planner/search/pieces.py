"""A flow in pieces, and what planners ask of it again and again."""

import numpy as np

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut as cut_lib
from planner.lower import program
from planner.search import lower_bounds


class Cut:
  """A flow in pieces.

  Attributes:
    flow: the cut flow.
    group: the group of stages at whose place each node runs.
    rows: rows at a time that each stage may take.
    loose: of nodes that move rows, the groups at whose place they may be, if
      those are several: it is the place of whoever reads first.
    floor: bounds of the flow.
    carried: values read along each edge of `floor`.
  """

  def __init__(self, flow, pieces, groups, rows):
    self.pieces = pieces
    self.flow = cut_lib.cut(flow, pieces)
    of = {stage: g for g, group in enumerate(groups) for stage in group}
    where = program.locate(self.flow, apart([(s,) for s in flow.stages]))
    self.group = np.array([of[stage] for stage in where])
    self.loose = _loose(self.flow, of)
    self.rows = {s: self._fitting(s, rows.get(s, (None,))) for s in flow.stages}
    self.floor = lower_bounds.Floor(self.flow)
    self.carried = [
      set(self.flow.nodes[j].writes).intersection(self.flow.nodes[i].reads)
      for j, i in self.floor.edges
    ]

  def _fitting(self, stage, options):
    fit, why = [], None
    for rows in options:
      taken = {} if rows is None else {stage: rows}
      try:
        program.check_rows(self.flow, apart([(stage,)], taken))
        fit.append(rows)
      except ValueError as error:
        why = error
    if not fit:
      raise why
    return tuple(fit)


def _loose(flow, of) -> dict[int, list[int]]:
  """As `Cut.loose`; `program.locate` asks who reads first in the end."""
  may_be = {}

  def readers(i):
    found = set()
    for j in {j for v in flow.nodes[i].writes for j in flow.readers.get(v, ())}:
      plumbing = graph.is_plumbing(flow.nodes[j])
      found |= readers(j) if plumbing else {of[flow.nodes[j].name]}
    return found

  for i, node in enumerate(flow.nodes):
    if not graph.is_plumbing(node):
      may_be[i] = {of[node.name]}
      continue
    made = [flow.maker[v] for v in node.reads if v in flow.maker]
    here = may_be[made[0]] if made else set()
    there = readers(i)
    may_be[i] = there or here if node.stage.name == 'join' else here or there
  return {i: sorted(some) for i, some in may_be.items() if len(some) > 1}


def apart(groups, rows=()) -> plan_lib.Plan:
  """A plan with a device for each group, to ask where things would be."""
  return plan_lib.Plan(
    {group[0]: plan_lib.Placement((i,)) for i, group in enumerate(groups)},
    {stage: group[0] for group in groups for stage in group},
    micro_batch=dict(rows),
  )
