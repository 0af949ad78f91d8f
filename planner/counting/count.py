"""Counts the arithmetic and the traffic of a stage by walking its jaxpr.

XLA's own cost analysis counts a scanned body once, whatever the trip count: a
model of eight layers is told as one. Here loops count as often as they turn.

Traffic is an estimate: elementwise arithmetic is taken to be fused with what
reads it, as XLA does, so that a chain reads its sources once and writes its end
once; products, gathers, sorts and loops read and write what they are given.
A loop that may end early, as decoding does, counts as if it did not; `decode`
says what it takes where lengths are known.
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax

from planner.costs import work as work_lib
from planner.costs.work import StageWork, Work
from planner.counting import jaxpr_walk
from planner.ir import graph

ROUTING = ('split', 'slice')  # Grains that move rows and compute nothing.
PARTS = (1, 2, 8, 64)  # Of a batch, for which its work is counted.


def work(
  fn: Callable,
  *shapes,
  trips: int | None = None,
  letters: Sequence[Sequence[str]] | None = None,
) -> Work:
  """The work of one call of `fn`.

  Args:
    fn: what JAX can trace.
    *shapes: its arguments, as trees of arrays or of `jax.ShapeDtypeStruct`s.
    trips: of a `while` loop that does not show how often it turns at most.
    letters: of the dimensions of every array among the arguments, for
      `Work.partial`.

  Raises:
    ValueError: for a loop without a bound, if `trips` is None.
    NotImplementedError: for a kernel that cannot be looked into.
  """
  run = fn if hasattr(fn, 'trace') else jax.jit(fn)
  jaxpr = run.trace(*shapes).jaxpr
  if letters is None:
    letters = [None] * len(jaxpr.jaxpr.invars)
  frame = jaxpr_walk.WorkCounter(trips)
  args = [
    frame.argument(var.aval, some)
    for var, some in zip(jaxpr.jaxpr.invars, letters, strict=True)
  ]
  made = frame.inline(jaxpr, args)
  frame.hand_out(made, args)
  return dataclasses.replace(
    frame.work(),
    bytes_in=sum(map(jaxpr_walk.size_of, jaxpr.in_avals)),
    bytes_out=sum(map(jaxpr_walk.size_of, jaxpr.out_avals)),
  )


def of_node(
  flow: graph.Flow, node: graph.Node, trips: int | None = None
) -> StageWork | None:
  """The work of a node for any number of rows; None where the host does it.

  Of a stage of rows it is the lines through the whole batch, a half, an eighth
  and a 64th of it.
  """
  if graph.is_plumbing(node) or node.stage.grain in ROUTING:
    taken = sum(flow.values[v].bytes for v in node.reads)
    made = sum(flow.values[v].bytes for v in node.writes)
    return StageWork(
      Work(bytes_in=taken, bytes_out=made, bytes_moved=taken + made, kernels=1)
    )
  if node.stage.host:
    return None

  def at(rows):
    leaves = []
    for v in node.reads:
      value = flow.values[v]
      shape = value.shape
      if rows and v in node.rows:
        shape = (rows, *shape[1:])
      leaves.append(jax.ShapeDtypeStruct(shape, value.dtype))
    args = jax.tree.unflatten(node.takes, leaves)
    letters = [flow.values[v].letters for v in node.reads]
    return work(node.stage.run, *args, trips=trips, letters=letters)

  rows = flow.rows_of(node)
  groups = rows // node.stage.group_size
  some = sorted({groups // part for part in PARTS} - {0})
  try:
    if not some:
      return StageWork(at(rows), rows=rows)
    sizes = [n * node.stage.group_size for n in some]
    return work_lib.piecewise_linear([(size, at(size)) for size in sizes])
  except (NotImplementedError, ValueError) as error:
    error.add_note(f'This happened in stage {node.name}, while counted.')
    raise


def of_flow(
  flow: graph.Flow, trips: int | None = None
) -> dict[str, StageWork | None]:
  """The work of every stage by name, of its call with the most rows.

  Args:
    flow: as recorded; what a planner adds to it is not counted, as its bytes
      are those of what it reads and writes.
    trips: of `while` loops that show no bound.
  """
  nodes = {}
  for node in flow.nodes:
    if not graph.is_plumbing(node):
      largest = nodes.setdefault(node.name, node)
      if flow.rows_of(node) > flow.rows_of(largest):
        nodes[node.name] = node
  return {name: of_node(flow, node, trips) for name, node in nodes.items()}
