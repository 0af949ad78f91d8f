"""Unrolls loops, so that the planner can assign costs to single nodes.

An unrolled flow computes what its loops compute in the expected number of
rounds.
"""

import dataclasses

from planner.ir import graph


def unroll(flow: graph.Flow) -> graph.Flow:
  """Returns the flow with every loop replaced by all rounds of its body."""
  if not any(node.body for node in flow.nodes):
    return flow
  writer = _Writer(flow)
  for node in flow.nodes:
    writer.add(node, writer.known)
  known = writer.known
  return dataclasses.replace(
    flow,
    nodes=tuple(writer.nodes),
    values=tuple(writer.values),
    outputs=tuple(known.get(v, v) for v in flow.outputs),
    carry=tuple((start, known.get(end, end)) for start, end in flow.carry),
  )


class _Writer:
  """The state of unrolling a flow.

  Attributes:
    nodes: the nodes of the unrolled flow.
    values: its values, the first of which are those of the original flow.
    known: the new ids of values that loops compute.
  """

  def __init__(self, flow: graph.Flow):
    self.nodes, self.values, self.known = [], list(flow.values), {}

  def add(self, node: graph.Node, known: dict[int, int]):
    """Adds a node with its values renamed by `known`."""
    if not node.body:
      self.nodes.append(renamed(node, known))
      return
    body, starts = node.body, [start for start, _ in node.body.carry]
    inner = {v: known.get(x, x) for v, x in node.ids_before.items()}
    for _ in range(graph.rounds(node)):
      for made in body.nodes:
        inner |= {v: self.new(body.values[v]) for v in made.writes}
        self.add(made, inner)
      ends = [inner[end] for _, end in body.carry]
      inner |= dict(zip(starts, ends, strict=True))
    known |= {made: inner[start] for start, made in node.ids_after.items()}

  def new(self, value: graph.Value) -> int:
    self.values.append(value)
    return len(self.values) - 1


def renamed(node: graph.Node, known: dict[int, int]) -> graph.Node:
  """Returns the node with its values renamed."""

  def name(values):
    return (known.get(v, v) for v in values)

  return dataclasses.replace(
    node,
    reads=tuple(name(node.reads)),
    writes=tuple(name(node.writes)),
    rows=frozenset(name(node.rows)),
    consumes=frozenset(name(node.consumes)),
  )
