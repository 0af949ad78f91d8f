"""Lowers a flow and a plan to one straight-line program a place.

A program is a list of seven kinds of instruction. Whoever can interpret those
can run any workflow: `simulate` does it with clocks, the runtime with arrays.
Weight synchronisation, context switching and pipelining have no other form.

Values go from place to place over links. Two ends are no place: inputs come
from the `SOURCE` and outputs go to the `SINK`, which is whoever calls the step.
"""

import collections
from typing import NamedTuple

from planner import graph

SOURCE, SINK = 'source', 'sink'


class Run(NamedTuple):
  """Call stage node `node`, which may overwrite the values in `donate`."""

  node: int
  donate: tuple[int, ...] = ()


class Send(NamedTuple):
  """Hand `value` to `place`."""

  value: int
  place: str


class Recv(NamedTuple):
  """Wait for `value` from `place`."""

  value: int
  place: str


class Keep(NamedTuple):
  """When all else is done, let `end` become the next step's `start`."""

  end: int
  start: int


class Drop(NamedTuple):
  """Forget `value`."""

  value: int


class Evict(NamedTuple):
  """Move `value` from device to host memory."""

  value: int


class Restore(NamedTuple):
  """Move `value` from host to device memory."""

  value: int


Instruction = Run | Send | Recv | Keep | Drop | Evict | Restore


def locate(flow: graph.Flow, plan) -> list[str]:
  """The place of every node. Rows are split where they are, joined where read.

  Raises:
    ValueError: for stages without a place.
  """
  homeless = [name for name in flow.stages if name not in plan.stages]
  if homeless:
    raise ValueError(
      f'The plan has no place for {homeless}: it names {sorted(plan.stages)}.'
    )
  where = [None] * len(flow.nodes)
  for i, node in enumerate(flow.nodes):
    if not graph.is_plumbing(node):
      where[i] = plan.stages[node.name]

  rank = {place: i for i, place in enumerate(plan.places)}

  def reader(i):
    """The first of the places that what a node makes goes to.

    First in the plan: in the order of nodes it would change with their order.
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


def homes(flow: graph.Flow, plan) -> dict[int, tuple[str, ...]]:
  """The places that hold each carried value from step to step.

  Every place that reads a carried value keeps a copy of its own, and is sent
  the next as soon as it is made. What no stage reads stays where it is made.
  """
  where = locate(flow, plan)
  ends = dict(flow.carry)

  def home(start, seen):
    readers = flow.readers.get(start, ())
    if readers:
      places = dict.fromkeys(where[i] for i in readers)
      maker = flow.maker.get(ends[start])
      # Its maker's place first, if it is one: what is asked for is had there.
      first = [where[maker]] if maker is not None else []
      return tuple(dict.fromkeys([p for p in first if p in places] + [*places]))
    end = ends[start]
    if end in flow.maker:
      return (where[flow.maker[end]],)
    if end in ends and end not in seen:
      return home(end, seen | {start})[:1]
    return (next(iter(plan.places)),)

  return {start: home(start, frozenset({start})) for start in ends}


def lower(flow: graph.Flow, plan, resident=None) -> dict[str, tuple]:
  """Returns the program of every place.

  A value is sent as soon as it is there and received when first needed. It is
  dropped after its last use; what a stage reads for the last time it may
  overwrite, if this place alone can hold it: carried values and sums.

  Args:
    flow: cut and ordered as the plan says.
    plan: where its stages run.
    resident: the places that hold each carried value, where another flow has
      settled that; `homes` of this flow if None.

  Raises:
    ValueError: for a plan that the flow cannot follow.
  """
  check_rows(flow, plan)
  where = locate(flow, plan)
  resident = resident or homes(flow, plan)
  needs = _needs(flow, plan, where, resident)
  programs = {place: [] for place in plan.places}
  here = {place: set() for place in plan.places}
  for start, places in resident.items():
    for place in places:
      here[place].add(start)

  def owner(v):
    if v in flow.maker:
      return where[flow.maker[v]]
    return resident[v][0] if v in resident else SOURCE

  def send(v):
    place = owner(v)
    if place != SOURCE:
      programs[place] += [
        Send(v, other) for other in needs[v] if v not in here.get(other, ())
      ]

  def fetch(v, place):
    if v not in here[place]:
      here[place].add(v)
      programs[place].append(Recv(v, owner(v)))

  for start, _ in flow.carry:
    send(start)
  for i, (node, place) in enumerate(zip(flow.nodes, where, strict=True)):
    for v in node.reads:
      fetch(v, place)
    programs[place].append(Run(i))
    here[place].update(node.writes)
    for v in node.writes:
      send(v)
  for v in flow.outputs:
    if owner(v) == SOURCE:  # An input that is an output, by way of any place.
      fetch(v, next(iter(plan.places)))
      programs[next(iter(plan.places))].append(Send(v, SINK))
  for start, end in flow.carry:
    for place in resident[start] if start != end else ():
      fetch(end, place)
      programs[place].append(Keep(end, start))

  idle = _private(flow, plan.evict)
  return {
    place: tuple(_forget(_evict(program, flow, idle), flow, place, resident))
    for place, program in programs.items()
  }


def _needs(flow, plan, where, resident):
  """Ends other than its own that need each value, in order of first need."""
  needs = collections.defaultdict(dict)
  for node, place in zip(flow.nodes, where, strict=True):
    for v in node.reads:
      needs[v][place] = None
  for start, end in flow.carry:
    if start != end:
      needs[end].update(dict.fromkeys(resident[start]))
  for v in flow.outputs:
    needs[v][SINK] = None
  for v, node in flow.maker.items():
    needs[v].pop(where[node], None)
  return needs


def check_rows(flow: graph.Flow, plan):
  """Refuses rows at a time that a stage does not have.

  Raises:
    ValueError: with what it has.
  """
  for node in flow.nodes:
    rows = plan.rows.get(node.name)
    if rows is None or graph.is_plumbing(node):
      continue
    if node.stage.grain not in ('row', 'sum') or node.stage.host:
      raise ValueError(
        f'The plan takes {rows} rows of {node.name} at once, whose grain is '
        f"{node.stage.grain!r}: only JAX stages of grain 'row' and 'sum' can "
        'be run in micro-batches.'
      )
    for size in {flow.values[v].shape[0] for v in node.rows}:
      if rows < 1 or size % rows or rows % node.stage.group:
        pieces = f' in each of {node.piece[1]} pieces' * (node.piece[1] > 1)
        raise ValueError(
          f'{node.name} has {size} rows{pieces}, in groups of '
          f'{node.stage.group}, which cannot be taken {rows} at a time: choose '
          f'a divisor of {size} that is a multiple of {node.stage.group}.'
        )


def _private(flow, names) -> frozenset[int]:
  """Carried values that the stages `names` alone read, and what they become."""
  mine = set()
  for start, end in flow.carry:
    readers = {flow.nodes[i].name for i in flow.readers.get(start, ())}
    if readers and readers <= set(names):
      mine |= {start, end}
  return frozenset(mine)


def _evict(program, flow, idle):
  """Has `idle` values on the device only around the stages that touch them."""
  out, away = [], set(idle)
  for op in program:
    if not isinstance(op, Run):
      out.append(op)
      continue
    node = flow.nodes[op.node]
    back = sorted(away.intersection(node.reads))
    out += [Restore(v) for v in back]
    out.append(op)
    gone = sorted(idle.intersection((*node.reads, *node.writes)))
    out += [Evict(v) for v in gone]
  return out


def _uses(op, flow):
  """Values that an instruction reads, and those it makes."""
  match op:
    case Run(i, _):
      return flow.nodes[i].reads, flow.nodes[i].writes
    case Send(v, _) | Keep(v, _) | Restore(v) | Evict(v):
      return (v,), ()
    case Recv(v, _):
      return (), (v,)
  raise AssertionError(op)


def _forget(program, flow, place, resident):
  """Adds drops and donations after the last use of every value."""
  held = {start for start, places in resident.items() if place in places}
  # What was lent, is given away or is kept twice is not this place's alone.
  kept = [op for op in program if isinstance(op, Keep)]
  starts = {op.start for op in kept}
  shared = collections.Counter(op.end for op in kept)
  shared.update({*flow.outputs, *flow.inputs, *(held - starts)})
  fresh = {op.start for op in kept if shared[op.end] == 1}
  fresh |= {
    v for node in flow.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  seen = held - starts  # What stays as it is stays here.
  outputs = set(flow.outputs)
  backwards = []
  for op in reversed(program):
    reads, writes = _uses(op, flow)
    last = {*reads, *writes} - seen
    if isinstance(op, Evict) and op.value in last:
      continue  # Nobody will ask for it again.
    seen |= last
    if isinstance(op, Run):
      donate = tuple(v for v in reads if v in last & fresh - outputs)
      op = Run(op.node, tuple(v for v in donate if donate.count(v) == 1))
      last -= set(op.donate)
    backwards += [Drop(v) for v in sorted(last, reverse=True)]
    backwards.append(op)
  return [*[Drop(v) for v in sorted(starts - seen)], *reversed(backwards)]
