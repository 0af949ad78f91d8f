"""The graph of a workflow step as plain data, which planners read and rewrite.

Nothing here needs JAX: a plan for a thousand devices is made on a laptop.
"""

import dataclasses
import functools
import math
from typing import Any

from planner.explain import flow_table


@dataclasses.dataclass(frozen=True)
class Value:
  """What is known of a value before it exists.

  Attributes:
    name: where it comes from, for people.
    shape: its dimensions.
    dtype: its type.
    letters: one a dimension, '' for none: how it may be sharded.
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
    stage: what is called; the planner uses only its fields.
    reads: ids of the values it takes.
    writes: ids of the values it makes.
    rows: those it reads that have rows to cut.
    takes: how `reads` fold back into the arguments; None where they are them.
    gives: how `writes` fold back into the result.
    piece: which piece of the batch it handles, and of how many.
    consumes: those it reads that are used up: nobody else reads them.
    body: of a loop, one round of it, whose carry and whose inputs are what it
      reads; None if it is none.
  """

  stage: Any
  reads: tuple[int, ...]
  writes: tuple[int, ...]
  rows: frozenset[int] = frozenset()
  takes: Any = None
  gives: Any = None
  piece: tuple[int, int] = (0, 1)
  consumes: frozenset[int] = frozenset()
  body: 'Flow | None' = None

  @property
  def name(self) -> str:
    return self.stage.name

  @property
  def asynchronous(self) -> bool:
    """Whether it may be begun before its turn."""
    return getattr(self.stage, 'asynchronous', False)

  @property
  def enters(self) -> dict[int, int]:
    """What a value of a loop's body is before the first round."""
    starts = (start for start, _ in self.body.carry)
    return dict(zip((*starts, *self.body.inputs), self.reads, strict=True))

  @property
  def leaves(self) -> dict[int, int]:
    """What a value that a loop carries is called after the last round."""
    starts = (start for start, _ in self.body.carry)
    return dict(zip(starts, self.writes, strict=True))


@dataclasses.dataclass(frozen=True)
class Flow:
  """A workflow step as a graph.

  Attributes:
    nodes: stage calls, in an order that respects every edge.
    values: what is known of every value, by id.
    inputs: values that arrive each step.
    outputs: values that leave each step.
    carry: pairs `(at start of step, at end of step)` of values that persist.
    gives: how `outputs` fold back into what the step returns.
  """

  nodes: tuple[Node, ...]
  values: tuple[Value, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  carry: tuple[tuple[int, int], ...]
  gives: Any = None

  @functools.cached_property
  def stages(self) -> tuple[str, ...]:
    """Names of its stages, in order of first call; not what planners add.

    Those of the bodies of loops are among them, and loops are not.
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
    """Which node makes a value."""
    return {v: i for i, node in enumerate(self.nodes) for v in node.writes}

  @functools.cached_property
  def readers(self) -> dict[int, tuple[int, ...]]:
    """Which nodes read a value, in order."""
    readers = {}
    for i, node in enumerate(self.nodes):
      for v in dict.fromkeys(node.reads):
        readers.setdefault(v, []).append(i)
    return {v: tuple(nodes) for v, nodes in readers.items()}

  def rows_of(self, node: Node) -> int:
    """How many rows a node is given; 0 if it has none."""
    return max((self.values[v].shape[0] for v in node.rows), default=0)

  def __str__(self):
    return flow_table.flow_table(self)


def is_plumbing(node: Node) -> bool:
  """Whether a planner has added it, to move rows or to add sums."""
  return isinstance(node.stage, Plumbing)


def rounds(node: Node) -> int:
  """How often a planner expects a loop to go round."""
  stage = node.stage
  return stage.at_most if stage.expect is None else stage.expect


@dataclasses.dataclass(frozen=True, eq=False)
class Plumbing:
  """A stage that a planner adds. It moves rows and adds sums; no more.

  Attributes:
    name: 'split', 'join' or 'total'.
    fn: on the arrays that it reads, of whatever library.
    grain: 'sum' for a total, whose memory may be used again; else 'batch'.
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
