"""Lowers a flow and a plan to one straight-line program for each place.

A program is a list of instructions of a few kinds. `simulate` interprets it
with clocks, the runtime with arrays. Weight synchronization, context switching
and pipelining all take this form.
"""

import collections
import dataclasses
import itertools
from typing import NamedTuple

from planner.ir import graph, groups
from planner.ir.instruction import (
  Acquire,
  Begin,
  Drop,
  Instruction,
  Keep,
  Offload,
  passed,
  Recv,
  Release,
  Repeat,
  Restore,
  Run,
  Send,
  SINK,
  SOURCE,
  Until,
)
from planner.lower import device_sharing as device_sharing_lib
from planner.lower import lifetimes, offloading

__all__ = [
  'Acquire',
  'Begin',
  'Drop',
  'Offload',
  'Instruction',
  'Keep',
  'Recv',
  'Release',
  'Repeat',
  'Restore',
  'Run',
  'SINK',
  'SOURCE',
  'Send',
  'Until',
  'check_rows',
  'homes',
  'locate',
  'lower',
  'parts',
  'passed',
]


def locate(flow: graph.Flow, plan) -> list[str]:
  """Returns the place of every node.

  Rows are split where they are, and joined where they are read. A loop counts
  as at the first of the places that take part in it.

  Raises:
    ValueError: for stages without a place.
  """
  unplaced = [name for name in flow.stages if name not in plan.stages]
  if unplaced:
    raise ValueError(
      f'The plan has no place for {unplaced}: it names {sorted(plan.stages)}.'
    )
  rank = {place: i for i, place in enumerate(plan.places)}
  where = [None] * len(flow.nodes)
  for i, node in enumerate(flow.nodes):
    if node.body:
      where[i] = min(locate(node.body, plan), key=rank.get)
    elif not graph.is_plumbing(node):
      where[i] = plan.stages[node.name]

  def reader(i):
    """Returns the first place that reads the results of a node.

    The first in the plan, so that it does not depend on the order of nodes.
    """
    readers = (j for v in flow.nodes[i].writes for j in flow.readers.get(v, ()))
    found = {where[j] or reader(j) for j in readers} - {None}
    return min(found, key=rank.get, default=None)

  for i, node in enumerate(flow.nodes):
    if where[i] is None:
      made = [where[flow.maker[v]] for v in node.reads if v in flow.maker]
      here = made[0] if made else None
      if node.stage.name == 'join':
        where[i] = reader(i) or here
      else:
        where[i] = here or reader(i)
      where[i] = where[i] or next(iter(plan.places))
  return where


class Part(NamedTuple):
  """The values that a place reads and writes in a node."""

  reads: tuple[int, ...]
  writes: tuple[int, ...]


def parts(flow: graph.Flow, plan) -> list[dict[str, Part]]:
  """Returns the parts of the places in every node: one, except for loops."""
  return [
    _of_loop(node, plan)
    if node.body
    else {place: Part(node.reads, node.writes)}
    for node, place in zip(flow.nodes, locate(flow, plan), strict=True)
  ]


def _of_loop(node: graph.Node, plan) -> dict[str, Part]:
  """Returns the parts of places that run a loop's body or hold its carry."""
  body = node.body
  before, after = node.ids_before, node.ids_after
  reads, writes = collections.defaultdict(dict), collections.defaultdict(dict)
  for start, places in homes(body, plan).items():
    for place in places:
      reads[place][before[start]] = None
      writes[place][after[start]] = None
  for part in parts(body, plan):
    for place, (values, _) in part.items():
      given = [before[v] for v in values if v in body.inputs]
      reads[place].update(dict.fromkeys(given))
  # Every place reads the boolean that ends the loop.
  for v in set(body.outputs).intersection(body.inputs):
    for given in reads.values():
      given[before[v]] = None
  return {
    place: Part(tuple(reads[place]), tuple(writes[place])) for place in reads
  }


def _made_at(flow: graph.Flow, there) -> dict[int, str]:
  """Returns the first place that computes each value."""
  made = {}
  for part in there:
    for place, (_, writes) in part.items():
      for v in writes:
        made.setdefault(v, place)
  return made


def homes(flow: graph.Flow, plan) -> dict[int, tuple[str, ...]]:
  """Returns the places that hold each carried value from step to step.

  Every place that reads a carried value keeps a copy, and receives the next
  version as soon as it is computed. A value that no stage reads stays at the
  place that computes it.
  """
  there = parts(flow, plan)
  made = _made_at(flow, there)
  ends = dict(flow.carry)

  def home(start, seen):
    places = dict.fromkeys(
      place
      for i in flow.readers.get(start, ())
      for place, part in there[i].items()
      if start in part.reads
    )
    if places:
      # The place that computes the value comes first, as it needs no transfer.
      first = [made[ends[start]]] if ends[start] in made else []
      return tuple(dict.fromkeys([p for p in first if p in places] + [*places]))
    end = ends[start]
    if end in made:
      return (made[end],)
    if end in ends and end not in seen:
      return home(end, seen | {start})[:1]
    return (next(iter(plan.places)),)

  return {start: home(start, frozenset({start})) for start in ends}


class _Writer:
  """Writes the programs of all places.

  Attributes:
    programs: the program of each place so far.
    here: the values that each place has.
    made: the first place that computes each value.
    resident: the places that hold each carried value.
  """

  def __init__(self, places, made, resident):
    self.made, self.resident = made, resident
    self.programs = {place: [] for place in places}
    self.here = {
      place: {start for start, held in resident.items() if place in held}
      for place in places
    }

  def owner(self, v: int) -> str:
    if v in self.made:
      return self.made[v]
    return self.resident[v][0] if v in self.resident else SOURCE

  def add(self, place: str, op: Instruction):
    self.programs[place].append(op)

  def send(self, v: int, ends):
    """Sends a value to the places that do not have it."""
    if self.owner(v) != SOURCE:
      for end in ends:
        if v not in self.here.get(end, ()):
          self.add(self.owner(v), Send(v, end))

  def begin(self, flow, there, nodes):
    """Starts asynchronous nodes at their places."""
    for i in nodes:
      for place, (reads, _) in there[i].items():
        for v in reads:
          self.fetch(v, place)
        self.add(place, Begin(i))

  def fetch(self, v: int, place: str):
    """Receives a value at a place that does not have it."""
    if v not in self.here[place]:
      self.here[place].add(v)
      self.add(place, Recv(v, self.owner(v)))


def _early(flow: graph.Flow) -> dict[int | None, list[int]]:
  """Returns asynchronous nodes by the node that computes their last input.

  None stands for the start of the step. As all places follow this one order, no
  place waits for a value that is computed later.
  """
  early = collections.defaultdict(list)
  for i, node in enumerate(flow.nodes):
    if node.asynchronous:
      makers = [flow.maker[v] for v in node.reads if v in flow.maker]
      early[max(makers, default=None)].append(i)
  return early


def lower(
  flow: graph.Flow, plan, resident=None, idle=None, loop: bool = False
) -> dict[str, tuple]:
  """Returns the program of every place.

  A value is sent as soon as it is computed, and received when first needed. An
  asynchronous call starts when its last input is computed. A value is dropped
  after its last use. A stage may overwrite the values that it is the last to
  read and that no other place can hold: carried values, sums, and values that
  are used up. Places that share devices release them while they wait.

  Args:
    flow: a flow, cut and ordered as the plan says.
    plan: the plan.
    resident: the places that hold each carried value, if another flow decides
      that; `homes` of this flow if None.
    idle: the carried values that are in host memory from call to call, if
      another flow decides that; `offloading.private` of this flow if None.
    loop: whether the flow is a loop's body, whose output is sent to all places
      and decides whether the loop ends.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  check_rows(flow, plan)
  there = parts(flow, plan)
  resident = resident or homes(flow, plan)
  writer = _Writer(plan.places, _made_at(flow, there), resident)
  all_places = dict.fromkeys(itertools.chain(*there, *resident.values()))
  receivers = all_places if loop else (SINK,)
  needs = _needs(flow, there, writer.made, resident, receivers)
  early = _early(flow)
  for start, _ in flow.carry:
    writer.send(start, needs[start])
  writer.begin(flow, there, early[None])
  for i, (node, part) in enumerate(zip(flow.nodes, there, strict=True)):
    ops = repeats(i, node, plan) if node.body else {}
    for place, (reads, writes) in part.items():
      for v in reads:
        writer.fetch(v, place)
      writer.add(place, ops.get(place, Run(i)))
      writer.here[place].update(writes)
    for v in node.writes:
      writer.send(v, needs[v])
    writer.begin(flow, there, early[i])
  for v in flow.outputs:
    if loop:
      for place in receivers:
        writer.fetch(v, place)
        writer.add(place, Until(v))
    elif writer.owner(v) == SOURCE:
      # An input that is an output passes through any place.
      first = next(iter(plan.places))
      writer.fetch(v, first)
      writer.add(first, Send(v, SINK))
  for start, end in flow.carry:
    for place in resident[start] if start != end else ():
      writer.fetch(end, place)
      writer.add(place, Keep(end, start))
  own = offloading.private(flow, plan.offload)
  idle = frozenset((*own, *own.values()) if idle is None else idle)
  streamed = offloading.streamed(flow, plan.offload)
  programs = {}
  for place, ops in writer.programs.items():
    ops = lifetimes.add_offloads(ops, flow, idle, streamed)
    ops = lifetimes.add_drops(ops, flow, place, resident)
    if plan.lease_devices(place):
      ops = device_sharing_lib.add_leases(ops, flow, plan, place, loop)
    programs[place] = tuple(ops)
  return programs


def repeats(i: int, node: graph.Node, plan) -> dict[str, Repeat]:
  """Returns the `Repeat` of every place that takes part in a loop.

  Offloaded values stay on the device between rounds.
  """
  body, before, after = node.body, node.ids_before, node.ids_after
  plan = dataclasses.replace(plan, offload=())
  held = homes(body, plan)
  return {
    place: Repeat(
      i,
      program,
      tuple((before[v], v, after[v]) for v in held if place in held[v]),
      tuple((before[v], v) for v in body.inputs if Recv(v, SOURCE) in program),
    )
    for place, program in lower(body, plan, held, loop=True).items()
  }


def _needs(flow, there, made, resident, receivers):
  """Returns the other places that need each value, in order of first need."""
  needs = collections.defaultdict(dict)
  for part in there:
    for place, (reads, _) in part.items():
      for v in reads:
        needs[v][place] = None
  for start, end in flow.carry:
    if start != end:
      needs[end].update(dict.fromkeys(resident[start]))
  for v in flow.outputs:
    needs[v].update(dict.fromkeys(receivers))
  for v, place in made.items():
    needs[v].pop(place, None)
  return needs


def check_rows(flow: graph.Flow, plan):
  """Checks that the micro-batches of a plan divide the rows of its stages.

  Raises:
    ValueError: if one does not.
  """
  for node in flow.nodes:
    rows = plan.micro_batch.get(node.name)
    if rows is None or graph.is_plumbing(node):
      continue
    if node.stage.grain not in ('row', 'sum') or node.stage.host:
      raise ValueError(
        f'The plan takes {rows} rows of {node.name} at once, whose grain is '
        f"{node.stage.grain!r}: only JAX stages of grain 'row' and 'sum' can "
        'be run in micro-batches.'
      )
    for size in {flow.values[v].shape[0] for v in node.rows}:
      if size % max(rows, 1) or not groups.can_take(node.stage, rows):
        pieces = f' in each of {node.piece[1]} pieces' * (node.piece[1] > 1)
        raise ValueError(
          f'{node.name} has {size} rows{pieces}, in groups of '
          f'{node.stage.group_size}, which cannot be taken {rows} at a time: '
          f'choose a divisor of {size} that is '
          f'{groups.wanted(node.stage)}.'
        )
