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
    writer.add(flow, node, writer.known)
  known = writer.known
  for start, end in flow.carry:  # A place holds both in one type.
    if known.get(end, end) in writer.carried:
      writer.carried.add(start)
  return dataclasses.replace(
    flow,
    nodes=writer.finished(),
    values=tuple(writer.values),
    outputs=tuple(known.get(v, v) for v in flow.outputs),
    carry=tuple((start, known.get(end, end)) for start, end in flow.carry),
    rounded=tuple((v, w) for (v, _), w in writer.in_dtype.items()),
  )


class _Writer:
  """The state of unrolling a flow.

  Attributes:
    nodes: the nodes of the unrolled flow.
    values: its values, the first of which are those of the original flow.
    known: the new ids of values that loops compute.
    in_dtype: as `graph.Flow`.
    carried: the new ids of what no place holds rounded: what a round hands on,
      and what becomes it from step to step.
  """

  def __init__(self, flow: graph.Flow):
    self.nodes, self.values, self.known = [], list(flow.values), {}
    self.in_dtype, self.carried = dict(flow.in_dtype), set()

  def add(
    self,
    flow: graph.Flow,
    node: graph.Node,
    known: dict[int, int],
    starts: frozenset[int] = frozenset(),
  ):
    """Adds a node of a flow.

    Args:
      flow: the flow.
      node: one of its nodes.
      known: new ids of its values.
      starts: new ids of what enclosing loops start with, which these hold as it
        is.
    """
    if not node.body:
      rounded = (
        (known.get(v, v), flow.values[w].dtype) for v, w in node.rounded
      )
      pairs = tuple(
        (v, self.round(v, dtype)) for v, dtype in rounded if v not in starts
      )
      node = dataclasses.replace(renamed(node, known), rounded=pairs)
      self.nodes.append(node)
      return
    body, carried = node.body, [start for start, _ in node.body.carry]
    inner = {v: known.get(x, x) for v, x in node.ids_before.items()}
    starts |= {inner[start] for start in carried}
    for _ in range(graph.rounds(node)):
      for made in body.nodes:
        inner |= {v: self.new(body.values[v]) for v in made.writes}
        self.add(body, made, inner, starts)
      ends = [inner[end] for _, end in body.carry]
      inner |= dict(zip(carried, ends, strict=True))
      self.carried.update(ends)
    known |= {made: inner[start] for start, made in node.ids_after.items()}

  def finished(self) -> tuple[graph.Node, ...]:
    """Returns the nodes, which round none of `carried`."""
    return tuple(
      dataclasses.replace(
        node,
        rounded=tuple(x for x in node.rounded if x[0] not in self.carried),
      )
      for node in self.nodes
    )

  def new(self, value: graph.Value) -> int:
    self.values.append(value)
    return len(self.values) - 1

  def round(self, v: int, dtype) -> int:
    """Returns the value that describes `v` in another type."""
    if (v, dtype) not in self.in_dtype:
      value = dataclasses.replace(self.values[v], dtype=dtype)
      self.in_dtype[v, dtype] = self.new(value)
    return self.in_dtype[v, dtype]


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
