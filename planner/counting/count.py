"""Counts the arithmetic and the traffic of a stage by walking its jaxpr.

XLA's own cost analysis counts a scanned body once, so that eight scanned layers
count as one. Here the body counts once for each trip.

Traffic is an estimate. Elementwise arithmetic is assumed to be fused with its
consumer, as XLA does: a chain reads its sources once and writes its result
once. Products, gathers, sorts and loops read and write their operands. A loop
that may end early, as decoding does, counts with its maximum trip count;
`costs.decoding.decode` corrects this where lengths are known.
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax

from planner.costs import work as work_lib
from planner.costs.decoding import decode
from planner.costs.work import StageWork, Work
from planner.counting import jaxpr_walk, variables
from planner.ir import graph

ROUTING = ('split', 'slice')  # Grains that only move rows.
PARTS = (1, 2, 8, 64)  # Fractions of a batch whose work is counted.


def work(
  fn: Callable,
  *shapes,
  trips: int | None = None,
  letters: Sequence[Sequence[str]] | None = None,
) -> Work:
  """Counts the work of one call of `fn`.

  Args:
    fn: a function that JAX can trace.
    *shapes: the arguments, as trees of arrays or of `jax.ShapeDtypeStruct`s.
    trips: trip count of a `while` loop whose maximum is not visible.
    letters: letters of the dimensions of every array among the arguments, for
      `Work.partial`.

  Raises:
    ValueError: for a loop without a bound, if `trips` is None.
    NotImplementedError: for a kernel whose work cannot be counted.
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
    bytes_in=sum(map(variables.size_of, jaxpr.in_avals)),
    bytes_out=sum(map(variables.size_of, jaxpr.out_avals)),
  )


def of_node(
  flow: graph.Flow, node: graph.Node, trips: int | None = None
) -> StageWork | decode.DecodeWork | None:
  """Counts the work of a node for any number of rows; None for a host stage.

  Continuous batching, in an engine or in slots, counts as its equivalent.

  It is interpolated between a full batch, a half, an eighth and a 64th of it.
  """
  if graph.is_plumbing(node) or node.stage.grain in ROUTING:
    taken = sum(flow.values[v].bytes for v in node.reads)
    made = sum(flow.values[v].bytes for v in node.writes)
    return StageWork(
      Work(bytes_in=taken, bytes_out=made, bytes_moved=taken + made, kernels=1)
    )
  engine = node.stage.engine
  if node.stage.host and engine is None:
    return None
  run = engine.equivalent if engine else node.stage.run

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
    return work(run, *args, trips=trips, letters=letters)

  rows = flow.rows_of(node)
  groups = rows // node.stage.group_size
  some = sorted({groups // part for part in PARTS} - {0})
  try:
    if not some:
      return StageWork(at(rows), rows=rows)
    sizes = [n * node.stage.group_size for n in some]
    works = [at(size) for size in sizes]
    if len(works) == 1 and works[0].turns:
      works.append(at(2 * sizes[0]))  # Two sizes tell what the turns are.
    works = _with_passes(works)[: len(sizes)]
    found = work_lib.piecewise_linear(list(zip(sizes, works, strict=True)))
    if engine is None:
      return found
    price = decode.of_engine if node.stage.host else decode.of_slots
    return price(found, engine)
  except (NotImplementedError, ValueError) as error:
    error.add_note(f'This happened in stage {node.name}, while counted.')
    raise


def _with_passes(works: list[Work]) -> list[Work]:
  """Counts turns as passes where they are not tokens of a row, as in decoding.

  A loop over packed rows has more turns for more rows; it counts as if it used
  all of its turns.
  """
  if len({work.turns for work in works}) == 1:
    return works
  return [
    dataclasses.replace(work, turns=0.0, passes=work.turns) for work in works
  ]


def of_flow(
  flow: graph.Flow, trips: int | None = None
) -> dict[str, StageWork | None]:
  """Counts the work of every stage, from its call with the most rows.

  Args:
    flow: as recorded.
    trips: trip count of `while` loops whose maximum is not visible.
  """
  nodes = {}
  for node in flow.nodes:
    if not graph.is_plumbing(node):
      largest = nodes.setdefault(node.name, node)
      if flow.rows_of(node) > flow.rows_of(largest):
        nodes[node.name] = node
  return {name: of_node(flow, node, trips) for name, node in nodes.items()}
