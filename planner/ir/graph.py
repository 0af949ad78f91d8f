"""The graph of a workflow step as plain data, which the planner rewrites.

Nothing here needs JAX, so that a laptop can plan for a thousand devices.
"""

import dataclasses
import functools
import math
from typing import Any

from planner.ir import flow_table


@dataclasses.dataclass(frozen=True)
class Value:
  """The description of a value that is not computed yet.

  Attributes:
    name: the path of its origin, for people.
    shape: its dimensions.
    dtype: its type.
    letters: a letter for each dimension, by which it may be sharded, or ''.
  """

  name: str
  shape: tuple[int, ...]
  dtype: Any
  letters: tuple[str, ...]

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Node:
  """One call of a stage.

  Attributes:
    stage: the stage; the planner uses only its fields.
    reads: ids of the values that it reads.
    writes: ids of the values that it computes.
    rows: ids of those values of `reads` that have rows.
    in_tree: the tree structure of the arguments; None if they are `reads`.
    out_tree: the tree structure of the result.
    piece: index of the piece of the batch, and the number of pieces.
    consumes: ids of those values of `reads` that are used up. No other node
      reads them.
    body: for a loop, one round, whose carry and inputs are `reads`; else None.
    rounded: pairs of values that the stage rounds before it uses them, and what
      they are then (`Flow.rounded`).
  """

  stage: Any
  reads: tuple[int, ...]
  writes: tuple[int, ...]
  rows: frozenset[int] = frozenset()
  in_tree: Any = None
  out_tree: Any = None
  piece: tuple[int, int] = (0, 1)
  consumes: frozenset[int] = frozenset()
  body: 'Flow | None' = None
  rounded: tuple[tuple[int, int], ...] = ()

  @property
  def name(self) -> str:
    return self.stage.name

  @property
  def asynchronous(self) -> bool:
    """Whether the call may be started early and awaited later."""
    return getattr(self.stage, 'asynchronous', False)

  @property
  def ids_before(self) -> dict[int, int]:
    """Maps values of a loop's body to their ids before the first round."""
    starts = (start for start, _ in self.body.carry)
    return dict(zip((*starts, *self.body.inputs), self.reads, strict=True))

  @property
  def ids_after(self) -> dict[int, int]:
    """Maps values that a loop carries to their ids after the last round."""
    starts = (start for start, _ in self.body.carry)
    return dict(zip(starts, self.writes, strict=True))


@dataclasses.dataclass(frozen=True)
class Flow:
  """A workflow step as a graph.

  Attributes:
    nodes: stage calls in topological order.
    values: descriptions of the values, by id.
    inputs: ids of values that arrive each step.
    outputs: ids of values that each step returns.
    carry: pairs of ids of each carried value, at the start and at the end of a
      step.
    out_tree: the tree structure of the outputs.
    carry_tree: the tree structure of the carried values.
    rounded: pairs of a value that some stage rounds and a value that describes
      it in that type. No node makes the latter: a place may hold it in place of
      the former (`planner.lower.rounding`).
    read_elsewhere: triples of a stage that reads the state in another flow, the
      number of a value in the carry, and the type to which the stage rounds it;
      None if it does not.
    handed_on: pairs of a value that a loop has made, which was unrolled, and of
      the stages whose places have it from the loop, and so as it is.
  """

  nodes: tuple[Node, ...]
  values: tuple[Value, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  carry: tuple[tuple[int, int], ...]
  out_tree: Any = None
  carry_tree: Any = None
  rounded: tuple[tuple[int, int], ...] = ()
  read_elsewhere: tuple[tuple[str, int, Any], ...] = ()
  handed_on: tuple[tuple[int, tuple[str, ...]], ...] = ()

  @functools.cached_property
  def stages(self) -> tuple[str, ...]:
    """Names of the stages in order of first call, without added plumbing.

    Stages in the bodies of loops are included; loops are not stages.
    """
    names = {}
    for node in self.nodes:
      if node.body:
        names.update(dict.fromkeys(node.body.stages))
      elif not is_plumbing(node):
        names[node.name] = None
    return tuple(names)

  @functools.cached_property
  def maker(self) -> dict[int, int]:
    """The index of the node that computes each value."""
    return {v: i for i, node in enumerate(self.nodes) for v in node.writes}

  @functools.cached_property
  def readers(self) -> dict[int, tuple[int, ...]]:
    """The indices of the nodes that read each value, in order."""
    readers = {}
    for i, node in enumerate(self.nodes):
      for v in dict.fromkeys(node.reads):
        readers.setdefault(v, []).append(i)
    return {v: tuple(nodes) for v, nodes in readers.items()}

  @functools.cached_property
  def constants(self) -> frozenset[int]:
    """Carried values that a step returns as they were, such as frozen ones."""
    return frozenset(start for start, end in self.carry if start == end)

  @functools.cached_property
  def in_dtype(self) -> dict[tuple[int, Any], int]:
    """The values of `rounded`, by what they describe and their types."""
    return {(v, self.values[w].dtype): w for v, w in self.rounded}

  @functools.cached_property
  def value_kinds(self) -> tuple[tuple[int, ...], tuple[Value, ...]]:
    """The kind of each value, and the first value of each kind.

    Values of a kind have the same shape, type and letters, and so are equally
    large on any mesh.
    """
    kinds, first = {}, []
    for value in self.values:
      key = value.shape, value.dtype, value.letters
      if key not in kinds:
        kinds[key] = len(first)
        first.append(value)
    of = (kinds[v.shape, v.dtype, v.letters] for v in self.values)
    return tuple(of), tuple(first)

  def alike(self, node: Node) -> Node:
    """Returns the first node that costs as much as this one on any placement.

    Both call the same stage, for the same piece, with values of the same
    shapes, types and letters. A step of a robot's policy has hundreds of such
    calls, and a search asks for the cost of each.
    """
    return self._alike[id(node)]

  @functools.cached_property
  def _alike(self) -> dict[int, Node]:
    """The first node of each kind, by the identity of a node."""
    kinds, values = {}, {}
    of = [
      values.setdefault(
        (value.shape, value.dtype, value.letters, v in self.constants),
        len(values),
      )
      for v, value in enumerate(self.values)
    ]

    def kind(node):
      ids = {}  # A value that a node reads twice counts once.
      names = [ids.setdefault(v, len(ids)) for v in (*node.reads, *node.writes)]
      return (
        node.name if is_plumbing(node) else id(node.stage),
        node.piece,
        id(node.body),
        len(node.reads),
        tuple(names),
        tuple((of[v], v in node.rows) for v in ids),
      )

    return {id(node): kinds.setdefault(kind(node), node) for node in self.nodes}

  def rows_of(self, node: Node) -> int:
    """Returns the number of rows that a node reads; 0 if none."""
    return max((self.values[v].shape[0] for v in node.rows), default=0)

  def __str__(self):
    return flow_table.flow_table(self)


def is_plumbing(node: Node) -> bool:
  """Whether the planner added the node, to move rows or to add sums."""
  return isinstance(node.stage, Plumbing)


def is_routing(node: Node) -> bool:
  """Whether a stage of a workflow only moves rows, such as to minibatches."""
  return node.stage.grain in ('split', 'slice')


def rounds(node: Node) -> int:
  """Returns the expected number of rounds of a loop."""
  stage = node.stage
  return stage.at_most if stage.expect is None else stage.expect


@dataclasses.dataclass(frozen=True, eq=False)
class Plumbing:
  """A stage that the planner adds to move rows or to add sums.

  Attributes:
    name: 'split', 'join' or 'total'.
    fn: a function of the arrays that it reads, of any array library.
    grain: 'sum' for a total, whose memory may be reused; else 'batch'.
  """

  name: str
  fn: Any
  grain: str = 'batch'
  unbatched = ()
  group_size = 1
  host = False

  @property
  def run(self):
    return self.fn
