"""The graph of a workflow step as plain data, which planners read and rewrite.

Nothing here needs JAX: a plan for a thousand devices is made on a laptop.
"""

import dataclasses
import functools
import math
from typing import Any

from planner import listing


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
  """

  stage: Any
  reads: tuple[int, ...]
  writes: tuple[int, ...]
  rows: frozenset[int] = frozenset()
  takes: Any = None
  gives: Any = None
  piece: tuple[int, int] = (0, 1)

  @property
  def name(self) -> str:
    return self.stage.name


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
    """Names of its stages, in order of first call; not what planners add."""
    names = (n.name for n in self.nodes if not is_plumbing(n))
    return tuple(dict.fromkeys(names))

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

  def __str__(self):
    return listing.listing(self)


def is_plumbing(node: Node) -> bool:
  """Whether a planner has added it, to move rows or to add sums."""
  return isinstance(node.stage, Plumbing)


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
  whole = ()
  group = 1
  host = False

  @property
  def run(self):
    return self.fn
