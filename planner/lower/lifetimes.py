"""Limits how long values stay in memory: drops, donations and offloads."""

import collections
from collections.abc import Iterable

from planner.ir import graph
from planner.ir.instruction import (
  Begin,
  Drop,
  Keep,
  Offload,
  Recv,
  Repeat,
  Restore,
  Run,
  Send,
  Until,
)


def add_offloads(program, flow, idle, streamed):
  """Keeps `idle` values on the device only around the stages that use them.

  Args:
    program: of a place.
    flow: the flow.
    idle: carried values at the start and at the end of a step.
    streamed: as `offloading.streamed`: these calls take values in host memory.
  """
  out, away, begun = [], set(idle), {}
  for op in program:
    if not isinstance(op, Begin | Run | Repeat):
      out.append(op)
      continue
    reads, writes = _uses(op, flow)
    if isinstance(op, Run) and op.node in streamed:
      pairs = streamed[op.node]
      op = op._replace(streamed=tuple(pairs.items()))
      reads = [v for v in reads if v not in pairs]
      writes = [v for v in writes if v not in pairs.values()]
    back = sorted(away.intersection(reads))
    out += [Restore(v) for v in back]
    away -= {*back}
    out.append(op)
    if isinstance(op, Begin):
      begun[op.node] = reads  # Its inputs stay on the device until its `Run`.
      continue
    begun.pop(op.node, None)
    gone = idle.intersection((*reads, *writes)).difference(*begun.values())
    out += [Offload(v) for v in sorted(gone)]
    away |= gone
  return out


def _uses(op, flow):
  """Returns the values that an instruction reads, and those it writes."""
  match op:
    case Begin(i):
      return flow.nodes[i].reads, ()
    case Run(i):
      return flow.nodes[i].reads, flow.nodes[i].writes
    case Repeat():
      return op.reads, op.writes
    case Send(v, _) | Keep(v, _) | Restore(v) | Offload(v) | Until(v):
      return (v,), ()
    case Recv(v, _):
      return (), (v,)
  raise AssertionError(op)


def versions(
  flow: graph.Flow, nodes: Iterable[int], starts: Iterable[int]
) -> dict[int, int]:
  """Returns the later versions of carried values that calls make.

  A call that is the last to read a carried value, or a version of it, and that
  returns a value of the same shape and type, makes its next version: an
  optimizer with several minibatches makes one in each update. A version takes
  over the memory of the one before.

  Args:
    flow: a flow.
    nodes: indices of a place's nodes, in their order.
    starts: carried values that the place replaces in every step.

  Returns:
    The carried value that each version began as.
  """
  nodes, root = list(nodes), {start: start for start in starts}
  last = {v: i for i in nodes for v in flow.nodes[i].reads}
  found = {}
  for i in nodes:
    node = flow.nodes[i]
    if graph.is_plumbing(node) or node.stage.host or node.body:
      continue
    old = [v for v in dict.fromkeys(node.reads) if v in root and last[v] == i]
    for v in node.writes:
      same = (u for u in old if _kind(flow, u) == _kind(flow, v))
      if (before := next(same, None)) is not None:
        old.remove(before)
        found[v] = root[v] = root[before]
  return found


def _kind(flow, v: int):
  value = flow.values[v]
  return value.shape, value.dtype, value.letters


def add_drops(program, flow, place, resident):
  """Adds drops and donations after the last use of every value."""
  held = {start for start, places in resident.items() if place in places}
  # Inputs, outputs and values that are kept twice have other owners.
  kept = [op for op in program if isinstance(op, Keep)]
  starts = {op.start for op in kept}
  shared = collections.Counter(op.end for op in kept)
  shared.update({*flow.outputs, *flow.inputs, *(held - starts)})
  exclusive = {op.start for op in kept if shared[op.end] == 1}
  # In a delay line, a value has an owner until the line ends.
  while late := {
    op.start
    for op in kept
    if op.start in exclusive and op.end in starts - exclusive
  }:
    exclusive -= late
  exclusive |= {
    v for node in flow.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  # Results of a call have memory of their own, so versions have one owner.
  nodes = [op.node for op in program if isinstance(op, Run)]
  exclusive |= {*versions(flow, nodes, starts)}
  # A value that is used up has no other reader, unless it is an input.
  exclusive |= {v for node in flow.nodes for v in node.consumes} - {
    *flow.inputs
  }
  used = held - starts  # Constant carried values are never dropped.
  owned, backwards = exclusive - set(flow.outputs), []
  for op in reversed(program):
    reads, writes = _uses(op, flow)
    last = {*reads, *writes} - used
    if isinstance(op, Offload) and op.value in last:
      continue  # It is dropped instead.
    used |= last
    if isinstance(op, Run | Repeat):
      times = collections.Counter(reads)
      once = (v for v in reads if v in last and v in owned and times[v] == 1)
      op = op._replace(donate=tuple(once))
      last -= set(op.donate)
    backwards += [Drop(v) for v in sorted(last, reverse=True)]
    backwards.append(op)
  return [*[Drop(v) for v in sorted(starts - used)], *reversed(backwards)]
