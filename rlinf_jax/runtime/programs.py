"""The programs of a plan's places, and questions about them."""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import hashlib
from typing import Any

import jax

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from planner.lower import offloading, passes
from planner.lower import program as program_lib


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A flow as a plan runs it.

  Attributes:
    flow: the flow, cut into pieces and ordered.
    programs: instructions by place.
    resident: places that hold each carried value, by its number in the carry.
  """

  flow: graph_lib.Flow
  programs: dict[str, tuple[program_lib.Instruction, ...]]
  resident: tuple[tuple[str, ...], ...]


def lower(
  plan: plan_lib.Plan,
  step: graph_lib.Flow,
  evaluate: graph_lib.Flow | None = None,
) -> dict[str, Lowered]:
  """Lowers a step and an evaluation with a plan; returns them by name.

  Args:
    plan: places, pieces, micro-batches, and the order of a step's calls.
    step: the flow of a step.
    evaluate: the flow of an evaluation, which carries the state unchanged. It
      is not cut into pieces.

  Raises:
    ValueError: for a plan that a flow cannot follow.
  """
  lowered = {'step': _lower(step, plan)}
  if evaluate:
    uncut = dataclasses.replace(plan, pieces=1, order=())
    resident = lowered['step'].resident
    idle = _idle(step, evaluate, plan)
    lowered['evaluate'] = _lower(evaluate, uncut, resident, idle)
  return lowered


def _idle(step, evaluate, plan) -> frozenset[int]:
  """The values of an evaluation that steps leave in host memory."""
  own = offloading.private(step, plan.offload)
  pairs = zip(step.carry, evaluate.carry, strict=True)
  return frozenset(value for (start, _), (value, _) in pairs if start in own)


def lower_like(
  plan: plan_lib.Plan, step: graph_lib.Flow, traced: Lowered
) -> Lowered:
  """Lowers a step of batches of other shapes, with the same residence.

  Args:
    plan: the plan that `traced` follows.
    step: the flow of the step.
    traced: the step of the batches that the plan was made for.

  Raises:
    ValueError: if what the step carries has other shapes, too.
  """

  def carried(flow):
    return [
      (flow.values[start].shape, flow.values[start].dtype)
      for start, _ in flow.carry
    ]

  if carried(step) != carried(traced.flow):
    raise ValueError(
      'The state that this workflow carries has the shapes of its batches, '
      'which differ: leave out buckets, so that all batches have one shape.'
    )
  return _lower(step, plan, traced.resident)


def _lower(flow, plan, resident=None, idle=None) -> Lowered:
  starts = [start for start, _ in flow.carry]
  if resident is not None:
    resident = dict(zip(starts, resident, strict=True))
  # Residence is a property of the uncut flow: pieces do not change it.
  resident = resident or program_lib.homes(flow, plan)
  cut, programs = passes.lower(flow, plan, resident=resident, idle=idle)
  return Lowered(cut, programs, tuple(resident[start] for start in starts))


def stage_calls(
  flow: graph_lib.Flow, program, loop: tuple[int, ...] = ()
) -> Iterator[
  tuple[tuple[int, ...], graph_lib.Flow, program_lib.Run, frozenset[int]]
]:
  """Every call of a stage in a program, those within loops included.

  Yields:
    The node numbers of the enclosing loops, the flow or loop body, the
    instruction, and the values of that flow which instructions other than
    calls read or write.
  """
  passed = frozenset(v for op in program for v in program_lib.passed(op))
  for op in program:
    if isinstance(op, program_lib.Run):
      yield loop, flow, op, passed
    elif isinstance(op, program_lib.Repeat):
      body = flow.nodes[op.node].body
      yield from stage_calls(body, op.program, (*loop, op.node))


def hosted(lowered: Lowered, place: str) -> set[int]:
  """Values that calls of a place read in host memory."""
  return {
    v
    for op in lowered.programs[place]
    if isinstance(op, program_lib.Run)
    for v, _ in op.streamed
  }


def state_shapes(flow: graph_lib.Flow) -> Any:
  """A tree of the shapes and types of the carried values of a step."""
  values = (flow.values[start] for start, _ in flow.carry)
  shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
  return jax.tree.unflatten(flow.carry_tree, shapes)


def outputs(program) -> set[int]:
  """Values that a place hands to the caller of the flow."""
  return {
    op.value
    for op in program
    if isinstance(op, program_lib.Send) and op.place == program_lib.SINK
  }


def traffic(
  lowered: Lowered, transport: Callable[[str, str, graph_lib.Value], str]
) -> list[tuple[str, str, str, int]]:
  """Counts the bytes that a step sends from place to place, outside of loops.

  Args:
    lowered: a step.
    transport: `source, target, value -> words`, as `Runtime.transport`.

  Returns:
    Source, target, transport and bytes.
  """
  total = collections.Counter()
  for source, program in lowered.programs.items():
    for op in program:
      if isinstance(op, program_lib.Send) and op.place != program_lib.SINK:
        value = lowered.flow.values[op.value]
        how = transport(source, op.place, value)
        total[source, op.place, how] += value.bytes
  return [(*ends, size) for ends, size in total.items()]


def fingerprint(lowered: Mapping[str, Lowered]) -> str:
  """A hash of what two processes must agree on to run parts of one step."""
  facts = [
    (name, x.programs, x.resident, *_facts(x.flow))
    for name, x in sorted(lowered.items())
  ]
  return hashlib.sha256(repr(facts).encode()).hexdigest()


def _facts(flow):
  values = [(v.name, v.shape, str(v.dtype), v.letters) for v in flow.values]
  nodes = [
    (n.name, n.reads, n.writes, n.piece, n.body and _facts(n.body))
    for n in flow.nodes
  ]
  return values, nodes, flow.inputs, flow.outputs, flow.carry
