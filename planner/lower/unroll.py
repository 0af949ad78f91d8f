"""Writes loops out, for whoever prices nodes one by one.

What an unrolled flow computes is what its loops would, did they go round as
often as is expected of them.
"""

import dataclasses

from planner.ir import graph


def unroll(flow: graph.Flow) -> graph.Flow:
  """Returns the flow without loops: with all rounds of every body."""
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
  """What has been written out so far.

  Attributes:
    nodes: those of the unrolled flow.
    values: its values, of which those of the flow are the first.
    known: what a value that a loop makes is called.
  """

  def __init__(self, flow: graph.Flow):
    self.nodes, self.values, self.known = [], list(flow.values), {}

  def add(self, node: graph.Node, known: dict[int, int]):
    """Adds a node, whose values have other names: those that are `known`."""
    if not node.body:
      self.nodes.append(renamed(node, known))
      return
    body, starts = node.body, [start for start, _ in node.body.carry]
    inner = {v: known.get(x, x) for v, x in node.enters.items()}
    for _ in range(graph.rounds(node)):
      for made in body.nodes:
        inner |= {v: self.new(body.values[v]) for v in made.writes}
        self.add(made, inner)
      ends = [inner[end] for _, end in body.carry]
      inner |= dict(zip(starts, ends, strict=True))
    known |= {made: inner[start] for start, made in node.leaves.items()}

  def new(self, value: graph.Value) -> int:
    self.values.append(value)
    return len(self.values) - 1


def renamed(node: graph.Node, known: dict[int, int]) -> graph.Node:
  """The node, with other names for its values."""

  def name(values):
    return (known.get(v, v) for v in values)

  return dataclasses.replace(
    node,
    reads=tuple(name(node.reads)),
    writes=tuple(name(node.writes)),
    rows=frozenset(name(node.rows)),
    consumes=frozenset(name(node.consumes)),
  )
