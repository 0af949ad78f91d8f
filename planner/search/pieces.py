"""A flow cut into pieces, with what the search needs to know of it."""

import numpy as np

from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import cut as cut_lib
from planner.lower import program
from planner.search import lower_bounds


class CutFlow:
  """A flow cut into pieces.

  Attributes:
    flow: the cut flow.
    group: the group of stages at whose place each node runs, [N].
    executions: the micro-batches and the remat that each stage may have.
    kind: the kind of each node, [N]. Nodes of a kind cost the same and run at
      the place of the same group.
    first: the first node of each kind.
    calls: the kinds of the nodes of each stage, and how many nodes each has.
    floating: for nodes that only move rows, the groups at whose places they may
      run, if there are several; such a node runs where its first reader does.
    bounds: lower bounds on the time of the flow.
    carried: the values that each edge of `bounds` carries.
  """

  def __init__(self, flow, pieces, groups, rows, remat):
    self.pieces = pieces
    self.flow = cut_lib.cut(flow, pieces)
    of = {stage: g for g, group in enumerate(groups) for stage in group}
    where = program.locate(self.flow, apart([(s,) for s in flow.stages]))
    self.group = np.array([of[stage] for stage in where])
    self.floating = _floating(self.flow, of)
    self.executions = {
      stage: tuple(
        plan_lib.Execution(n, policy)
        for policy in remat.get(stage, (plan_lib.STORE_ALL,))
        for n in self._fitting(stage, rows.get(stage, (None,)))
      )
      for stage in flow.stages
    }
    kinds = {}
    self.kind = np.array(
      [
        kinds.setdefault(
          (id(self.flow.alike(node)), self.group[i], *self.floating.get(i, ())),
          len(kinds),
        )
        for i, node in enumerate(self.flow.nodes)
      ],
      int,
    )
    self.first = np.unique(self.kind, return_index=True)[1]
    self.calls = {stage: [] for stage in flow.stages}
    for k, times in enumerate(np.bincount(self.kind)):
      node = self.flow.nodes[self.first[k]]
      if not graph.is_plumbing(node):
        self.calls[node.name].append((k, times))
    self.bounds = lower_bounds.LowerBounds(self.flow)
    self.carried = [
      set(self.flow.nodes[j].writes).intersection(self.flow.nodes[i].reads)
      for j, i in self.bounds.edges
    ]

  def _fitting(self, stage, options):
    fit, error = [], None
    for rows in options:
      taken = {} if rows is None else {stage: rows}
      try:
        program.check_rows(self.flow, apart([(stage,)], taken))
        fit.append(rows)
      except ValueError as refusal:
        error = refusal
    if not fit:
      raise error
    return tuple(fit)


def _floating(flow, of) -> dict[int, list[int]]:
  """Returns `CutFlow.floating`; `program.locate` decides in the end."""
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
  """Returns a plan with a device for each group of stages."""
  return plan_lib.Plan(
    {group[0]: plan_lib.Placement((i,)) for i, group in enumerate(groups)},
    {stage: group[0] for group in groups for stage in group},
    micro_batch=dict(rows),
  )
