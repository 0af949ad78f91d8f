"""The space of plans that is worth a search, given a flow and its costs."""

from planner.costs import roofline
from planner.ir import graph
from planner.ir import plan as plan_lib
from planner.search import exact, grouping

PIECES = (1, 2, 4, 8)
HALVES = (1, 2)  # On one device, while others than it work on one of them.
FRACTIONS = (1, 4, 16, 64)  # Of a stage's rows, taken at a time.
CROWDED = 1 / 8  # Of a device's memory: a stage that needs more may be cut.
FASTER = 0.95  # Of the seconds of all rows at once, to be worth a try.
GROUPS = 8  # Of stages, to be placed apart: an RL step has no more that matter.
LARGE = 1 / 100  # Of the largest that is carried, to be worth evicting.


def space(flow: graph.Flow, model: roofline.Roofline) -> exact.Space:
  """Whole nodes where there are several; micro-batches where they can help."""
  cluster = model.cluster
  several = cluster.devices > cluster.node
  pieces = PIECES
  if cluster.devices == 1:
    pieces = HALVES if any(node.asynchronous for node in flow.nodes) else (1,)
  rows = {
    node.name: options
    for node in flow.nodes
    if (options := _at_a_time(flow, node, model))
  }
  return exact.Space(
    cluster.devices,
    unit=cluster.node if several else 1,
    pieces=pieces,
    micro_batch=rows,
    offload=_idle(flow, cluster.capacity),
    together=grouping.glue(flow, model, cluster.devices, most=GROUPS),
  )


def _at_a_time(flow, node, model) -> tuple[int | None, ...]:
  """Rows that a stage may take at a time; none where all is as good."""
  stage, there = node.stage, flow.rows_of(node)
  if stage.grain not in ('row', 'sum') or stage.host or not there:
    return ()
  options = {None: None}
  if model.works[node.name].at(there).bytes_alive >= (model.capacity * CROWDED):
    shares = (there // n for n in FRACTIONS[1:] if not there % n)
    options |= {n: None for n in shares if n and not n % stage.group_size}
  one = plan_lib.Placement()
  whole = model.seconds(flow, node, one, None)
  for n in model.measured.rows(node.name):
    if n < there and not there % n:
      if model.seconds(flow, node, one, n) < FASTER * whole:
        options[n] = None
  return tuple(options) if len(options) > 1 else ()


def _idle(flow, capacity: float) -> tuple[str, ...]:
  """Stages that alone read something carried: they could do without it.

  None where all that is carried is small: evicting it would only take time.
  """
  if sum(flow.values[v].bytes for v, _ in flow.carry) < capacity * CROWDED:
    return ()
  names = {}
  for start, _ in flow.carry:
    readers = {flow.nodes[i].name for i in flow.readers.get(start, ())}
    if len(readers) == 1:
      (name,) = readers
      names[name] = names.get(name, 0) + flow.values[start].bytes
  most = max(names.values(), default=0)
  return tuple(n for n in flow.stages if names.get(n, 0) > most * LARGE)
