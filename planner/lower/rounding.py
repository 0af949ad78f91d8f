"""Finds the values that places hold rounded, as their stages use them.

A language model in bfloat16 trains parameters in float32, and samples with
rounded ones. A place that only samples needs the rounded ones alone: half of
the memory, and half of the bytes that each step sends. Stages say what they
round before they use it (`Node.rounded`). As they would round it themselves, no
number changes.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import itertools
from typing import Any

from planner.ir import graph
from planner.lower import program

Rounded = Mapping[int, int]
"""For values, by number: the rounded value that a place holds instead."""


def held(
  flow: graph.Flow,
  plan,
  resident: Mapping[int, tuple[str, ...]] | None = None,
  carried: Mapping[str, Mapping[int, Any]] | None = None,
  given: Mapping[str, Rounded] | None = None,
) -> dict[str, Rounded]:
  """Returns which values each place holds rounded.

  A place holds a value rounded if it receives the value or carries it from step
  to step, and if all of its stages round it to the same type. A value that the
  place makes itself is not rounded. Neither is a carried value that other
  places or a checkpoint read from the place, unless all readers everywhere
  round it to that type.

  Args:
    flow: a flow, as recorded or cut into pieces.
    plan: the plan.
    resident: the places that hold each carried value; `program.homes` if None.
    carried: for an evaluation, the types in which places hold carried values,
      as `carried_dtypes` returns them for the flow of a step: an evaluation
      holds the state as the step does. Values that it lacks are not rounded.
      None if `flow` itself decides the types.
    given: for a loop's body, which of its inputs each place holds rounded.
  """
  found = {place: {} for place in plan.places}
  if not flow.rounded:
    return found
  resident = resident or program.homes(flow, plan)
  made = collections.defaultdict(set)
  for part in program.parts(flow, plan):
    for place, (_, writes) in part.items():
      made[place].update(writes)
  for place in plan.places:
    reads = _reads(flow, plan, place)
    kept = {*flow.inputs, *flow.outputs, *made[place]}
    kept |= {
      v
      for v, names in flow.handed_on
      if any(plan.stages.get(name) == place for name in names)
    }
    here = {v: w for v, w in reads.items() if w != v and v not in kept}
    for group in _groups(flow, resident, place):
      some = {v for i in group for v in flow.carry[i]}
      if carried is None:
        dtype = _dtype(flow, plan, place, resident, group, reads)
        dtype = None if some & kept else dtype
      else:
        dtype = carried.get(place, {}).get(group[0])
      here = {v: w for v, w in here.items() if v not in some}
      if dtype is not None:
        pairs = ((v, flow.in_dtype.get((v, dtype))) for v in some)
        here |= {v: w for v, w in pairs if w is not None}
    found[place] = here | dict((given or {}).get(place, {}))
  return found


def in_body(
  flow: graph.Flow, node: graph.Node, plan, outside: Mapping[str, Rounded]
) -> dict[str, Rounded]:
  """Returns what each place holds rounded during the rounds of a loop.

  Args:
    flow: the flow with the loop.
    node: the loop.
    plan: the plan.
    outside: which values of `flow` each place holds rounded.
  """
  body, given = node.body, {}
  for place, here in outside.items():
    pairs = (
      (x, body.in_dtype.get((x, flow.values[here[v]].dtype)))
      for x, v in node.ids_before.items()
      if v in here and x in body.inputs
    )
    given[place] = {x: w for x, w in pairs if w is not None}
  return held(body, plan, carried={}, given=given)


def carried_dtypes(
  flow: graph.Flow, found: Mapping[str, Rounded]
) -> dict[str, dict[int, Any]]:
  """Returns the types of the carried values that places hold rounded.

  Args:
    flow: a flow.
    found: which of its values each place holds rounded, as `held` returns it.

  Returns:
    For each place, the types by the value's index in `flow.carry`.
  """
  return {
    place: {
      i: flow.values[here[start]].dtype
      for i, (start, _) in enumerate(flow.carry)
      if start in here
    }
    for place, here in found.items()
  }


def with_readers(step: graph.Flow, evaluate: graph.Flow) -> graph.Flow:
  """Returns the flow of a step with `read_elsewhere` set by an evaluation.

  That is what the stages of the evaluation read of the state.

  Args:
    step: the flow of a step.
    evaluate: the flow of an evaluation, which carries the same values.
  """
  number = {start: i for i, (start, _) in enumerate(evaluate.carry)}
  returned = ((program.SINK, v, None) for v in evaluate.outputs)
  found = dict.fromkeys(
    (name, number[v], dtype)
    for name, v, dtype in itertools.chain(_all_reads(evaluate), returned)
    if v in number
  )
  return dataclasses.replace(step, read_elsewhere=tuple(found))


def _all_reads(flow: graph.Flow) -> Iterable[tuple[str, int, Any]]:
  """Yields each stage, value that it reads, and type to which it rounds it.

  The type is None for a value that is read unrounded. In place of a loop, the
  stages of its body are yielded; they read unrounded what the loop carries.
  """
  for node in flow.nodes:
    if not node.body:
      to = dict(node.rounded)
      for v in node.reads:
        yield node.name, v, flow.values[to[v]].dtype if v in to else None
      continue
    before = node.ids_before
    for name, x, dtype in _all_reads(node.body):
      if x in before:
        yield name, before[x], dtype if x in node.body.inputs else None


def _reads(flow, plan, place: str) -> dict[int, int]:
  """Returns the values that a place reads, with the rounded one of each.

  That is the value to which all stages of the place round it, or the value
  itself if one of them reads it unrounded or if they round it to different
  types. Nodes that only move rows read their values unrounded at every place.
  """
  found = {}

  def read(v, w):
    found[v] = w if found.get(v, w) == w else v

  for node in flow.nodes:
    if graph.is_plumbing(node):
      found |= {v: v for v in node.reads}
    elif node.body:
      body, before = node.body, node.ids_before
      for x, w in _reads(body, plan, place).items():
        if x in before and x in body.inputs:
          key = before[x], body.values[w].dtype
          read(before[x], flow.in_dtype.get(key, before[x]))
      carried = program.homes(body, plan)
      for x in {*carried, *body.outputs}:
        if x in before and place in carried.get(x, (place,)):
          read(before[x], before[x])
    elif plan.stages.get(node.name) == place:
      to = dict(node.rounded)
      for v in node.reads:
        read(v, to.get(v, v))
  return found


def _groups(flow, resident, place: str) -> list[list[int]]:
  """Returns the indices of carried values of a place, in connected groups.

  Two are connected if the end of one is the start of the other, or if they have
  the same end. So are the older parameters that `staleness` keeps: a step
  makes each of them of the next newer ones.
  """
  groups = {}  # By value: the indices in its group, and the group's values.
  for i, (start, end) in enumerate(flow.carry):
    if place not in resident[start]:
      continue
    first, second = (groups.get(v, ([], [v])) for v in (start, end))
    if second is not first:
      first = first[0] + second[0], [*first[1], *second[1]]
    first[0].append(i)
    groups |= dict.fromkeys(first[1], first)
  return [*{id(group): sorted(group[0]) for group in groups.values()}.values()]


def _dtype(flow, plan, place, resident, group, reads):
  """Returns the type to which a place rounds a group of carried values.

  None if it does not round them. A group is one of `_groups`, and `reads` is
  what `_reads` returns for the place.
  """
  some = {v for i in group for v in flow.carry[i]}
  types = {
    flow.values[reads[v]].dtype if reads[v] != v else None
    for v in some
    if v in reads
  }
  if len(types) != 1 or None in types:
    return None
  owned = {i for i in group if resident[flow.carry[i][0]][0] == place}
  for i in owned:  # Its owner writes it to checkpoints and hands it on.
    start, end = flow.carry[i]
    later = {other for other, last in flow.carry if last == start}
    there = {name for v in (start, *later) for name in resident[v]}
    if start == end or there != {place}:
      return None
  types |= {
    dtype
    for name, i, dtype in flow.read_elsewhere
    if i in owned or i in group and plan.stages.get(name) == place
  }
  return types.pop() if len(types) == 1 else None
