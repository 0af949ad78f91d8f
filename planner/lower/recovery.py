"""Decides whether a lost place can be replaced, and what it must run again.

A place that holds only copies of other places' values can be replaced in the
middle of a step. The replacement receives these copies and runs the program
from the start, without the nodes whose results have all arrived already.
"""

from collections.abc import Set
from typing import NamedTuple

from planner.ir import graph
from planner.lower.program import Keep, Recv, Repeat, Run, Send, SINK, SOURCE


class Left(NamedTuple):
  """The part of a program that must run again.

  Attributes:
    skip: nodes that need not run again.
    sent: pairs of values and places that need not be sent again.
  """

  skip: frozenset[int]
  sent: frozenset[tuple[int, str]]


EVERYTHING = Left(frozenset(), frozenset())


def copies(
  flow: graph.Flow, program, resident: Set[int]
) -> dict[int, Recv | None] | None:
  """Returns how a place receives the carried values that it holds.

  Args:
    flow: a step, cut and ordered.
    program: the program of the place.
    resident: ids at the start of the step of the carried values that it holds.

  Returns:
    The `Recv` of each value by its id, None for a constant value. None if the
    place cannot be replaced: it computes a carried value itself, or uses up a
    token, such as that of a simulator.
  """
  if _uses_up(flow, program):
    return None
  receives = {
    op.value: op
    for op in program
    if isinstance(op, Recv) and op.place != SOURCE
  }
  found = {}
  for start, end in flow.carry:
    if start in resident:
      if end != start and end not in receives:
        return None
      found[start] = receives.get(end)
  return found


def _uses_up(flow, program) -> bool:
  for op in program:
    if isinstance(op, Repeat):
      if _uses_up(flow.nodes[op.node].body, op.program):
        return True
    elif isinstance(op, Run) and flow.nodes[op.node].consumes:
      return True
  return False


def left(flow: graph.Flow, program, sent: Set[tuple[int, str]]) -> Left | None:
  """Returns what the replacement of a lost place must run again.

  Args:
    flow: the step, cut and ordered.
    program: the program of the place.
    sent: pairs of its values and the places at which they have arrived.

  Returns:
    The work that can be skipped. None if the step cannot be completed: an
    engine that is not deterministic computed values that have arrived and
    values that are missing.
  """
  arrived = frozenset(sent)
  loops = [op for op in program if isinstance(op, Repeat)]
  if loops:
    inexact = any(acts_outside(flow.nodes[op.node].body) for op in loops)
    return None if arrived and inexact else EVERYTHING
  runs, values = set(), set()
  for op in reversed(program):
    match op:
      case Send(v, place) if place == SINK or (v, place) not in arrived:
        values.add(v)
      case Keep(end, _):
        values.add(end)
      case Run(i) if values.intersection(flow.nodes[i].writes):
        runs.add(i)
        values.update(flow.nodes[i].reads)
  skip = {op.node for op in program if isinstance(op, Run)} - runs
  if _contradicts(flow, program, runs, arrived):
    return None
  return Left(frozenset(skip), arrived)


def acts_outside(flow: graph.Flow) -> bool:
  """Whether an engine outside JAX runs in a flow."""
  return any(
    acts_outside(node.body) if node.body else node.asynchronous
    for node in flow.nodes
  )


def _contradicts(flow, program, runs, arrived) -> bool:
  """Whether running again would contradict values that have arrived."""
  other = set()  # Values that would differ.
  for op in program:
    if isinstance(op, Run):
      node = flow.nodes[op.node]
      again = node.asynchronous and op.node in runs
      if again or other.intersection(node.reads):
        other.update(node.writes)
  return any(v in other for v, _ in arrived)
