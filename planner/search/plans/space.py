"""The space of plans to search, and the default one of a flow."""

import dataclasses
import json

from planner.costs import roofline
from planner.costs.work import StageWork
from planner.ir import graph, groups
from planner.ir import plan as plan_lib
from planner.search.plans import grouping

PIECES = (1, 2, 4, 8)
# On one device, where an asynchronous stage may run beside it.
ASYNCHRONOUS_PIECES = (1, 2)
FRACTIONS = tuple(2**i for i in range(1, 9))  # Of a stage's rows: 1/2 to 1/256.
# Of a device's memory: larger stages may be micro-batched, and have remat.
LARGE_STAGE = 1 / 8
FASTER = 0.95  # Of the seconds of a full batch, to be worth a try.
GROUPS = 8  # Of stages that are placed apart.
LARGE_VALUE = 1 / 100  # Of the largest carried state, to be worth offloading.


@dataclasses.dataclass(frozen=True)
class Space:
  """The plans that a search considers.

  Attributes:
    devices: number of devices; a plan may leave some idle.
    unit: sizes of places are multiples of this: 1, or a whole node.
    max_places: largest number of places.
    min_places: smallest number of places.
    pieces: numbers of pieces that a batch may pass in; those that the flow
      cannot be cut into are left out.
    micro_batch: of a stage, the numbers of rows that it may take at once (None:
      all that it is given). Of those that fit in memory where the stage is
      placed, a plan takes the fastest. Stages that are not named take all.
    offload: stages whose carried values may stay in host memory.
    remat: of a stage that differentiates a model, policies of activations that
      it may compute again. Of all micro-batches and policies that fit in memory
      where the stage is placed, a plan takes the fastest.
    colocated: groups of stages that share a place in every plan.
  """

  devices: int
  unit: int = 1
  max_places: int = 4
  min_places: int = 1
  pieces: tuple[int, ...] = (1,)
  micro_batch: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
  offload: tuple[str, ...] = ()
  colocated: tuple[tuple[str, ...], ...] = ()
  remat: tuple[tuple[str, tuple[str, ...]], ...] = ()

  def __post_init__(self):
    for field in ('micro_batch', 'remat'):
      value = getattr(self, field)
      if isinstance(value, dict):
        pairs = tuple((s, tuple(options)) for s, options in value.items())
        object.__setattr__(self, field, pairs)
      empty = [stage for stage, options in getattr(self, field) if not options]
      if empty:
        raise ValueError(
          f'A space has no {field} to choose from for {empty}: leave them out '
          'or give one option or more.'
        )
    if self.unit < 1 or self.devices < self.unit:
      raise ValueError(
        f'A space of {self.devices} devices has no place of {self.unit}: '
        'the unit is at least 1 and at most all devices.'
      )
    if not 1 <= self.min_places <= self.max_places:
      raise ValueError(
        f'A space of {self.min_places} to {self.max_places} places '
        'has no plan: give 1 or more, and a maximum that is not below the '
        'minimum.'
      )
    if not self.pieces or min(self.pieces) < 1:
      raise ValueError(
        f'A space of batches in {self.pieces} pieces has no plan: give 1 or '
        'more.'
      )

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)


def default_space(flow: graph.Flow, model: roofline.Roofline) -> Space:
  """Returns the space of plans that are worth a search.

  Places have whole nodes if there are several nodes. Micro-batches are tried
  where they save memory or were measured to be faster.
  """
  cluster = model.cluster
  several = cluster.num_devices > cluster.devices_per_node
  pieces = PIECES
  if cluster.num_devices == 1:
    pieces = (
      ASYNCHRONOUS_PIECES
      if any(node.asynchronous for node in flow.nodes)
      else (1,)
    )
  rows = {
    node.name: options
    for node in flow.nodes
    if (options := _micro_batches(flow, node, model))
  }
  return Space(
    cluster.num_devices,
    unit=cluster.devices_per_node if several else 1,
    pieces=pieces,
    micro_batch=rows,
    offload=_offloadable(flow, cluster.capacity),
    colocated=grouping.merge_small_stages(
      flow,
      model,
      cluster.num_devices,
      most=GROUPS,
      unknown=() if cluster.shared_cores else _assumed_on_host(flow, model),
    ),
    remat=_policies(flow, model),
  )


def _assumed_on_host(flow, model) -> list[str]:
  """Returns host stages whose seconds are assumed.

  A place of their own would give accelerators to what needs none, for seconds
  that nothing is known about.
  """
  one = plan_lib.Placement()
  return [
    node.name
    for node in flow.nodes
    if not graph.is_plumbing(node)
    and node.stage.host
    and model.explain(flow, node, one).total.tag == 'assumed'
  ]


def _policies(flow, model) -> dict[str, tuple[str, ...]]:
  """Returns the policies of large stages that have several."""
  return {
    node.name: (plan_lib.STORE_ALL, *call.remat)
    for node in flow.nodes
    if isinstance(call := model.works.get(node.name), StageWork)
    and call.remat
    and _is_large(flow, node, model)
  }


def _is_large(flow, node, model) -> bool:
  """Whether the activations of a full batch take much of a device's memory."""
  alive = model.works[node.name].at(flow.rows_of(node)).bytes_alive
  return alive >= model.capacity * LARGE_STAGE


def _micro_batches(flow, node, model) -> tuple[int | None, ...]:
  """Returns micro-batches to try; none where a full batch is as good."""
  stage, there = node.stage, flow.rows_of(node)
  if stage.grain not in ('row', 'sum') or stage.host or not there:
    return ()
  options = {None: None}
  if _is_large(flow, node, model):
    sizes = micro_batch_sizes(there, stage, model.cluster)
    options |= dict.fromkeys(sizes)
  one = plan_lib.Placement()
  full = model.seconds(flow, node, one, None)
  for n in model.measured.rows(node.name):
    if n < there and not there % n:
      if model.seconds(flow, node, one, n) < FASTER * full:
        options[n] = None
  possible = tuple(n for n in options if _evaluates(model.evaluation, node, n))
  return possible if len(possible) > 1 else ()


def _evaluates(evaluation, node, rows: int | None) -> bool:
  """Whether a micro-batch divides the rows of a stage in evaluations, too."""
  return rows is None or all(
    not evaluation.rows_of(other) % rows
    for other in (evaluation.nodes if evaluation else ())
    if other.name == node.name
  )


def micro_batch_sizes(rows: int, stage, cluster) -> list[int]:
  """Returns micro-batches to try: parts of the rows, the largest first.

  Halves of halves, and one group for each of 1, 2, 4, … devices, which are no
  such part where the rows are not a power of two. Or one row for each, where
  groups may be divided: of a large model and long rows, a device may have
  memory for no more.
  """
  halves = [rows // n for n in FRACTIONS if not rows % n]
  ways, small = 1, []
  while ways <= cluster.num_devices:
    small += [ways, stage.group_size * ways]
    ways *= 2
  possible = halves + [n for n in small if n < rows and not rows % n]
  taken = {n for n in possible if groups.can_take(stage, n)}
  return sorted(taken, reverse=True)


def _offloadable(flow, capacity: float) -> tuple[str, ...]:
  """Returns stages that are the only readers of some carried value.

  None if all carried values together are small: offloading them would take time
  and save little.
  """
  if sum(flow.values[v].bytes for v, _ in flow.carry) < capacity * LARGE_STAGE:
    return ()
  names = {}
  for start, _ in flow.carry:
    readers = {flow.nodes[i].name for i in flow.readers.get(start, ())}
    if len(readers) == 1:
      (name,) = readers
      names[name] = names.get(name, 0) + flow.values[start].bytes
  most = max(names.values(), default=0)
  return tuple(n for n in flow.stages if names.get(n, 0) > most * LARGE_VALUE)
