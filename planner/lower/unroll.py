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
  for v, dtype in flow.in_dtype:
    if v in known:
      writer.round(known[v], dtype)
  return dataclasses.replace(
    flow,
    nodes=tuple(writer.nodes),
    values=tuple(writer.values),
    outputs=tuple(known.get(v, v) for v in flow.outputs),
    carry=tuple((start, known.get(end, end)) for start, end in flow.carry),
    rounded=tuple((v, w) for (v, _), w in writer.in_dtype.items()),
    handed_on=tuple(writer.handed_on),
  )


class _Writer:
  """The state of unrolling a flow.

  Attributes:
    nodes: the nodes of the unrolled flow.
    values: its values, the first of which are those of the original flow.
    known: the new ids of values that loops compute.
    in_dtype: as `graph.Flow`.
    handed_on: likewise.
  """

  def __init__(self, flow: graph.Flow):
    self.nodes, self.values, self.known = [], list(flow.values), {}
    self.in_dtype, self.handed_on = dict(flow.in_dtype), []

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
      starts: ids in `flow` of what a round of enclosing loops starts with,
        which these hold as it is.
    """
    if not node.body:
      rounded = (
        (known.get(v, v), flow.values[w].dtype)
        for v, w in node.rounded
        if v not in starts
      )
      pairs = tuple((v, self.round(v, dtype)) for v, dtype in rounded)
      node = dataclasses.replace(renamed(node, known), rounded=pairs)
      self.nodes.append(node)
      return
    body, carried = node.body, [start for start, _ in node.body.carry]
    inner = {v: known.get(x, x) for v, x in node.ids_before.items()}
    # By ids of the body: the same value may also be given as it is.
    here = {x for x, v in node.ids_before.items() if v in starts}
    here = frozenset(here.union(carried))
    for _ in range(graph.rounds(node)):
      for made in body.nodes:
        inner |= {v: self.new(body.values[v]) for v in made.writes}
        self.add(body, made, inner, here)
      ends = [inner[end] for _, end in body.carry]
      inner |= dict(zip(carried, ends, strict=True))
    self.handed_on += [
      (inner[start], _holders(body, start)) for start in carried
    ]
    known |= {made: inner[start] for start, made in node.ids_after.items()}

  def new(self, value: graph.Value) -> int:
    self.values.append(value)
    return len(self.values) - 1

  def round(self, v: int, dtype) -> int:
    """Returns the value that describes `v` in another type."""
    if (v, dtype) not in self.in_dtype:
      value = dataclasses.replace(self.values[v], dtype=dtype)
      self.in_dtype[v, dtype] = self.new(value)
    return self.in_dtype[v, dtype]


def _holders(body: graph.Flow, start: int) -> tuple[str, ...]:
  """Returns the stages whose places hold a value that a loop carries.

  As `program.homes` says, these are its readers. Where there are none, one
  place holds it, which depends on the plan: all stages are returned.
  """
  return tuple(_readers(body, start)) or body.stages


def _readers(body: graph.Flow, value: int) -> dict[str, None]:
  """Returns the stages that read a value, those of inner loops included."""
  found = {}
  for i in body.readers.get(value, ()):
    node = body.nodes[i]
    if not node.body:
      found[node.name] = None
      continue
    starts = {start for start, _ in node.body.carry}
    for inner, outer in node.ids_before.items():
      if outer == value and inner in starts:
        found |= dict.fromkeys(_holders(node.body, inner))
      elif outer == value:
        found |= _readers(node.body, inner)
  return found


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
