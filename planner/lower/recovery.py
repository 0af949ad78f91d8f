"""What a place that was lost has to do again, and whether another can do it.

A place that only holds copies of what others make can be put up anew in the
middle of a step: it is given those copies, runs its program from the beginning,
and leaves out what led to nothing but values that have already arrived.
"""

from collections.abc import Set
from typing import NamedTuple

from planner.ir import graph
from planner.lower.program import Keep, Recv, Repeat, Run, Send, SINK, SOURCE


class Left(NamedTuple):
  """What is left of a program.

  Attributes:
    skip: nodes that need not run again.
    sent: values, with the places that have them, that need not be sent.
  """

  skip: frozenset[int]
  sent: frozenset[tuple[int, str]]


EVERYTHING = Left(frozenset(), frozenset())


def copies(
  flow: graph.Flow, program, resident: Set[int]
) -> dict[int, Recv | None] | None:
  """What a place holds from step to step, if all of it is had from elsewhere.

  Args:
    flow: a step, cut and ordered.
    program: of the place.
    resident: starts of the carried values that it holds.

  Returns:
    By their starts, how it is sent each, None if that never changes; None if
    the place cannot be replaced, as it makes some of it itself, or uses up what
    is more than a value, such as a simulator.
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
  """What another has to do in place of one that was lost within a step.

  Args:
    flow: the step, cut and ordered.
    program: of the place.
    sent: values of it, with the places at which they have arrived.

  Returns:
    What need not be done again; None if it cannot be done again, as an engine
    that does nothing twice made what has arrived and what is missing.
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
  """Whether an engine outside JAX acts in it."""
  return any(
    acts_outside(node.body) if node.body else node.asynchronous
    for node in flow.nodes
  )


def _contradicts(flow, program, runs, arrived) -> bool:
  """Whether an engine would make again what has arrived in another form."""
  other = set()  # Values that would be others.
  for op in program:
    if isinstance(op, Run):
      node = flow.nodes[op.node]
      again = node.asynchronous and op.node in runs
      if again or other.intersection(node.reads):
        other.update(node.writes)
  return any(v in other for v, _ in arrived)
