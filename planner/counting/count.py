"""Counts the arithmetic and the traffic of a stage by walking its jaxpr.

XLA's own cost analysis counts a scanned body once, so that eight scanned layers
count as one. Here the body counts once for each trip.

Traffic is an estimate. Elementwise arithmetic is assumed to be fused with its
consumer, as XLA does: a chain reads its sources once and writes its result
once. Products, gathers, sorts and loops read and write their operands. A loop
that may end early, as decoding does, counts with its maximum trip count;
`costs.decoding.decode` corrects this where lengths are known.
"""

from collections.abc import Callable, Container, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools

import jax

from planner.costs import work as work_lib
from planner.costs.decoding import decode
from planner.costs.work import StageWork, Work
from planner.counting import divisions, jaxpr_walk, variables
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.lower import offloading
from sharding import elementwise
from sharding import mesh as mesh_lib

PARTS = (1, 2, 8, 64)  # Fractions of a batch whose work is counted.
# Those between which work may be a line, with smaller ones for many devices.
ALL_PARTS = (*PARTS, *(8**k for k in range(3, 8)))


def work(
  fn: Callable,
  *shapes,
  trips: int | None = None,
  letters: Sequence[Sequence[str]] | None = None,
  division: divisions.Division | None = None,
  platform: str | None = None,
) -> Work:
  """Counts the work of one call of `fn`.

  Args:
    fn: a function that JAX can trace.
    *shapes: the arguments, as trees of arrays or of `jax.ShapeDtypeStruct`s.
    trips: trip count of a `while` loop whose maximum is not visible.
    letters: letters of the dimensions of every array among the arguments, for
      `Work.partial`.
    division: axes of a mesh, of which the bytes of one device are counted.
    platform: what `fn` is traced for, such as 'tpu'; None for JAX's default.

  Raises:
    ValueError: for a loop without a bound, if `trips` is None.
    NotImplementedError: for a kernel whose work cannot be counted.
  """
  jaxpr = _traced(fn, shapes, division, platform)
  return _work_of(jaxpr, trips, letters, division, platform)


def _traced(fn, shapes, division, platform):
  """Traces `fn`, which says what it divides, and which kernels it uses."""
  run = fn if hasattr(fn, 'trace') else jax.jit(fn)
  with _ambient(division, platform):
    return run.trace(*shapes).jaxpr


def _work_of(
  jaxpr, trips, letters, division, platform, without: str | None = None
) -> Work:
  """Counts the work of a program but for that in a scope; see `work`."""
  if letters is None:
    letters = [None] * len(jaxpr.jaxpr.invars)
  frame = jaxpr_walk.WorkCounter(trips, division)
  frame.platform, frame.without = platform, without
  frame.parameters = frozenset(
    var.aval.shape
    for var, some in zip(jaxpr.jaxpr.invars, letters, strict=True)
    if len(some or ()) > 1 and any(some) and 'B' not in some
  )
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


def _ambient(division: divisions.Division | None, platform: str | None):
  if platform == jax.default_backend():
    platform = None
  if division is None and platform is None:
    return contextlib.nullcontext()
  axes = division.sizes if division else {}
  return jax.sharding.use_abstract_mesh(mesh_lib.abstract(axes, platform))


def of_node(
  flow: graph.Flow,
  node: graph.Node,
  trips: int | None = None,
  platform: str | None = None,
) -> StageWork | decode.DecodeWork | None:
  """Counts the work of a node for any number of rows; None for a host stage.

  Continuous batching, in an engine or in slots, counts as its equivalent.

  It is counted for a full batch, a half, an eighth and a 64th of it, and for
  other sizes when they are asked for; bytes in memory, and on devices that
  divide arrays, are interpolated. A stage whose remat is a choice of the plan
  is counted under each policy.
  """
  if graph.is_plumbing(node) or graph.is_routing(node):
    taken = sum(flow.values[v].bytes for v in node.reads)
    made = sum(flow.values[v].bytes for v in node.writes)
    return StageWork(
      Work(bytes_in=taken, bytes_out=made, bytes_moved=taken + made, kernels=1)
    )
  engine = node.stage.engine
  if node.stage.host and engine is None:
    return None
  run = engine.equivalent if engine else node.stage.run
  try:
    how = {'trips': trips, 'platform': platform}
    traced = _programs(flow, node, run, platform)
    attention = engine and _attention(flow, node, platform)
    counter = _counter(flow, node, traced, **how, slots=attention)
    counted = _counted(counter, _sizes(flow, node))
    if engine is None:
      found = _with_choices(flow, node, counter, counted, how)
      return dataclasses.replace(found, elementwise=_elementwise(flow, node))
    arguments = _arguments(flow, node, 0)
    if node.stage.host:
      return decode.of_engine(_interpolated(counted), engine, arguments)
    rows = engine.rows(*arguments) if engine.rows else 0
    return decode.of_slots(_interpolated(counted), engine, attention, rows)
  except (NotImplementedError, ValueError) as error:
    error.add_note(f'This happened in stage {node.name}, while counted.')
    raise


def _attention(flow, node, platform):
  """Returns the work of attention in slots; None for an engine."""
  with _ambient(None, platform):
    arguments = _arguments(flow, node, flow.rows_of(node))
    return node.stage.attention_work(*arguments)


def _elementwise(flow, node) -> tuple[tuple[int, ...], ...]:
  """Returns the positions of `StageWork.elementwise`."""
  offloaded = offloading.streamed(flow, [node.name])
  (at,) = (i for i, other in enumerate(flow.nodes) if other is node)
  values = offloaded.get(at, {})
  positions = [i for i, v in enumerate(node.reads) if v in values]
  if not positions:
    return ()
  arguments = _arguments(flow, node, flow.rows_of(node))
  program = elementwise.inlined(node.stage.run, *arguments)
  parts = elementwise.parts(program.jaxpr, positions)
  return tuple(part.reads for part in parts if part.elementwise)


def _sizes(flow, node, parts=PARTS) -> list[int]:
  """Returns the rows to count a node for, the fewest first; 0 for no rows.

  Parts of a group read what its rows share as often as a whole group does, so
  the work of fewer rows than a group's is another line.
  """
  engine = node.stage.engine
  if engine and engine.resized:
    shapes = _arguments(flow, node, 0)
    some = {engine.rows(*shapes) // part for part in parts} - {0}
    return sorted({engine.rows(*engine.resized(x, *shapes)) for x in some})
  group_size = node.stage.group_size
  groups = flow.rows_of(node) // group_size
  some = {group_size * (groups // part) for part in parts} - {0}
  if some and group_size > 1 and node.stage.divisible_groups:
    some |= {1, group_size}
  return sorted(some) or [0]


def _counter(
  flow, node, traced, on=None, *, trips, platform, slots=None
) -> Callable[[int], Work]:
  """Returns a memoized count of a function of a stage's arguments, by rows.

  Args:
    flow: the flow of the node.
    node: the call of a stage.
    traced: traces the function, as `_programs` does.
    on: axes and a layout, as `divisions.Division` takes them; None to count the
      work of one device alone.
    trips: as in `work`.
    platform: as in `work`.
    slots: the work of attention in slots, which counts by itself; None if the
      function computes its attention as it is.
  """
  letters = [flow.values[v].letters for v in node.reads]

  @functools.cache
  def at(rows):
    division = divisions.Division(*on) if on else None
    run = functools.partial(
      _work_of, traced(rows, division), trips, letters, division, platform
    )
    if slots is None:
      return run()
    if not slots.writes_scores:
      return run(slots.scope)
    # Scores of as many columns are in memory.
    return dataclasses.replace(run(slots.scope), bytes_alive=run().bytes_alive)

  return at


def _programs(flow, node, run, platform):
  """Returns `rows, division -> jaxpr`, which traces as rarely as it can.

  Tracing takes most of the time of counting. Two meshes share a program if all
  axes whose sizes the stage has read have the same sizes in both.
  """
  kept = {}

  def traced(rows, division):
    sizes = division.sizes if division else {}
    some = kept.setdefault((rows, tuple(sizes)), [])
    for other, jaxpr in some:
      if all(other[x] == sizes[x] for x in sizes if x in node.stage.axes_read):
        return jaxpr
    jaxpr = _traced(run, _arguments(flow, node, rows), division, platform)
    some.append((sizes, jaxpr))
    return jaxpr

  return traced


def _counted(at, sizes) -> list[tuple[int, Work]]:
  """Returns pairs of rows and their work, as `_counter` counts it."""
  works = [at(size) for size in sizes]
  if len(works) == 1 and works[0].turns and sizes[0]:
    works.append(at(2 * sizes[0]))  # Two sizes tell what the turns are.
  return list(zip(sizes, _with_passes(works), strict=False))


def _interpolated(points: list[tuple[int, Work]]) -> StageWork:
  if points[0][0]:
    return work_lib.piecewise_linear(points)
  return StageWork(points[0][1])


def _arguments(flow, node, rows: int):
  """Returns the shapes of a node's arguments with a number of rows."""
  leaves = []
  for v in node.reads:
    value = flow.values[v]
    shape = value.shape
    if rows and v in node.rows:
      shape = (rows, *shape[1:])
    leaves.append(jax.ShapeDtypeStruct(shape, value.dtype))
  shapes = jax.tree.unflatten(node.in_tree, leaves)
  engine = node.stage.engine
  if rows and engine and engine.resized:
    return engine.resized(rows, *shapes)
  return shapes


def _with_choices(flow, node, counter, counted, how) -> StageWork:
  """Interpolates the work; its segments can be counted again.

  Each is counted again, at its own ends, for the policies that a plan may name
  and for devices that divide its arrays. For one device's work, so is any other
  number of rows.
  """
  stage = node.stage
  work, policies = _interpolated(counted), ()
  if stage.grain == 'sum' and hasattr(stage, 'remat_policies'):
    # A stage of rows only computes forward.
    arguments = _arguments(flow, node, flow.rows_of(node))
    policies = stage.remat_policies(*arguments)
    policies = [policy for policy in policies if policy != plan_lib.STORE_ALL]

  @functools.cache
  def programs(policy):
    run = stage.run if policy is None else stage.run_with_remat(policy)
    return _programs(flow, node, run, how['platform'])

  def as_passes(one):
    return _turns_as_passes(one) if counted[-1][1].passes else one

  @functools.cache
  def counter_of(policy, *on):  # Segments share their ends.
    return _counter(flow, node, programs(policy), on, **how)

  def again(sizes, policy, *on):
    some = _counted(counter_of(policy, *on), sizes)
    return _interpolated([(n, as_passes(one)) for n, one in some])

  @functools.cache
  def count(policy):
    at = counter_of(policy) if policy else counter
    some = sorted({stage.group_size, *_sizes(flow, node, ALL_PARTS)})
    anywhere = work_lib.count_at_any_size(lambda n: as_passes(at(n)), some)

    def of_groups(rows):
      """None for rows that are no whole groups, which a stage cannot take."""
      part = stage.divisible_groups and stage.group_size % rows == 0
      return anywhere(rows) if part or rows % stage.group_size == 0 else None

    return of_groups

  def with_choices(segment, sizes):
    def work_under(policy):
      divide = functools.partial(again, sizes, policy)
      return dataclasses.replace(
        divide(), count=count(policy), divide=functools.cache(divide)
      )

    return dataclasses.replace(
      segment,
      count=count(None) if sizes[0] else None,
      divide=functools.cache(functools.partial(again, sizes, None)),
      remat=_Policies(policies, work_under),
    )

  sizes = [n for n, _ in counted]
  ends = [*itertools.pairwise(sizes)] or [sizes]
  *below, last = (
    with_choices(segment, tuple(some))
    for segment, some in zip((*work.below, work), ends, strict=True)
  )
  return dataclasses.replace(last, below=tuple(below))


class _Policies(Mapping):
  """The work under each policy, counted when it is asked for.

  Counting takes seconds, and a stage of few activations needs no other policy.
  """

  def __init__(self, policies: Sequence[str], work_under: Callable):
    self._policies = tuple(policies)
    self._work_under = functools.cache(work_under)

  def __getitem__(self, policy: str) -> StageWork:
    if policy not in self._policies:
      raise KeyError(policy)
    return self._work_under(policy)

  def __iter__(self):
    return iter(self._policies)

  def __len__(self) -> int:
    return len(self._policies)


def _with_passes(works: list[Work]) -> list[Work]:
  """Counts turns as passes where they are not tokens of a row, as in decoding.

  A loop over packed rows has more turns for more rows; it counts as if it used
  all of its turns.
  """
  if len({work.turns for work in works}) == 1:
    return works
  return [*map(_turns_as_passes, works)]


def _turns_as_passes(work: Work) -> Work:
  return dataclasses.replace(work, turns=0.0, passes=work.turns + work.passes)


def of_flow(
  flow: graph.Flow,
  trips: int | None = None,
  platform: str | None = None,
  known: Container[str] = (),
) -> dict[str, StageWork | None]:
  """Counts the work of every stage, from its call with the most rows.

  Args:
    flow: as recorded.
    trips: trip count of `while` loops whose maximum is not visible.
    platform: what stages are traced for, as in `work`.
    known: stages that are left out.
  """
  nodes = {}
  for node in flow.nodes:
    if not graph.is_plumbing(node) and node.name not in known:
      largest = nodes.setdefault(node.name, node)
      if flow.rows_of(node) > flow.rows_of(largest):
        nodes[node.name] = node
  return {
    name: of_node(flow, node, trips, platform) for name, node in nodes.items()
  }
