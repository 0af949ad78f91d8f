"""The programs of a plan's places, and questions about them."""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import hashlib
from typing import Any

import jax

from planner.ir import graph as graph_lib
from planner.ir import plan as plan_lib
from planner.lower import offloading, passes, rounding
from planner.lower import program as program_lib


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A flow as a plan runs it.

  Attributes:
    flow: the flow, cut into pieces and ordered.
    programs: instructions by place.
    resident: places that hold each carried value, by its number in the carry.
    rounded: what each place holds in place of values of the flow, or of a
      loop's body, by the node numbers of the enclosing loops
      (`planner.lower.rounding`).
  """

  flow: graph_lib.Flow
  programs: dict[str, tuple[program_lib.Instruction, ...]]
  resident: tuple[tuple[str, ...], ...]
  rounded: dict[tuple[int, ...], dict[str, rounding.Rounded]]

  def value(
    self, v: int, place: str, loop: tuple[int, ...] = ()
  ) -> graph_lib.Value:
    """The description of a value as a place holds it.

    Args:
      v: the value.
      place: name of the place.
      loop: node numbers of the enclosing loops.
    """
    return self.body(loop).values[self.rounded[loop][place].get(v, v)]

  def dtype(self, v: int, place: str, loop: tuple[int, ...] = ()) -> Any:
    """The type in which a place holds a value rounded; None if it does not."""
    is_rounded = v in self.rounded[loop][place]
    return self.value(v, place, loop).dtype if is_rounded else None

  def body(self, loop: tuple[int, ...]) -> graph_lib.Flow:
    """The body of a loop; the flow itself outside of loops."""
    flow = self.flow
    for node in loop:
      flow = flow.nodes[node].body
    return flow


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
  if evaluate:
    step = rounding.with_readers(step, evaluate)
  lowered = {'step': _lower(step, plan)}
  if evaluate:
    uncut = dataclasses.replace(plan, pieces=1, order=())
    idle = _idle(step, evaluate, plan)
    lowered['evaluate'] = _lower(evaluate, uncut, lowered['step'], idle)
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
  return _lower(step, plan, traced)


def _lower(flow, plan, like: Lowered | None = None, idle=None) -> Lowered:
  """Lowers a flow, with the carried values where and as another has them."""
  starts = [start for start, _ in flow.carry]
  if like is None:
    # Residence is a property of the uncut flow: pieces do not change it.
    resident, carried = program_lib.homes(flow, plan), None
  else:
    resident = dict(zip(starts, like.resident, strict=True))
    carried = rounding.carried_dtypes(like.flow, like.rounded[()])
  cut, programs = passes.lower(flow, plan, resident=resident, idle=idle)
  rounded = {(): rounding.held(cut, plan, resident, carried)}
  _add_bodies(rounded, cut, plan, ())
  residence = tuple(resident[start] for start in starts)
  return Lowered(cut, programs, residence, rounded)


def _add_bodies(rounded, flow, plan, loop: tuple[int, ...]):
  """Adds what places hold rounded within the loops of a flow."""
  for i, node in enumerate(flow.nodes):
    if node.body:
      inner = *loop, i
      rounded[inner] = rounding.in_body(flow, node, plan, rounded[loop])
      _add_bodies(rounded, node.body, plan, inner)


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
        value = lowered.value(op.value, op.place)
        how = transport(source, op.place, value)
        total[source, op.place, how] += value.bytes
  return [(*ends, size) for ends, size in total.items()]


def fingerprint(lowered: Mapping[str, Lowered]) -> str:
  """A hash of what two processes must agree on to run parts of one step."""
  facts = [
    (name, x.programs, x.resident, x.rounded, *_facts(x.flow))
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
