"""How long values live at a place: drops, donations, offloads."""

import collections

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


def add_offloads(program, flow, idle):
  """Has `idle` values on the device only around the stages that touch them."""
  out, away, begun = [], set(idle), {}
  for op in program:
    if not isinstance(op, Begin | Run | Repeat):
      out.append(op)
      continue
    reads, writes = _uses(op, flow)
    back = sorted(away.intersection(reads))
    out += [Restore(v) for v in back]
    away -= {*back}
    out.append(op)
    if isinstance(op, Begin):
      begun[op.node] = reads  # Which stay until its turn has come.
      continue
    begun.pop(op.node, None)
    gone = idle.intersection((*reads, *writes)).difference(*begun.values())
    out += [Offload(v) for v in sorted(gone)]
    away |= gone
  return out


def _uses(op, flow):
  """Values that an instruction reads, and those it makes."""
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


def add_drops(program, flow, place, resident):
  """Adds drops and donations after the last use of every value."""
  held = {start for start, places in resident.items() if place in places}
  # What was lent, is given away or is kept twice is not this place's alone.
  kept = [op for op in program if isinstance(op, Keep)]
  starts = {op.start for op in kept}
  shared = collections.Counter(op.end for op in kept)
  shared.update({*flow.outputs, *flow.inputs, *(held - starts)})
  fresh = {op.start for op in kept if shared[op.end] == 1}
  # In a delay line, nothing is fresher than what enters it.
  while late := {
    op.start for op in kept if op.start in fresh and op.end in starts - fresh
  }:
    fresh -= late
  fresh |= {
    v for node in flow.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  # What is used up nobody else reads; but inputs are lent.
  fresh |= {v for node in flow.nodes for v in node.consumes} - {*flow.inputs}
  seen = held - starts  # What stays as it is stays here.
  outputs = set(flow.outputs)
  backwards = []
  for op in reversed(program):
    reads, writes = _uses(op, flow)
    last = {*reads, *writes} - seen
    if isinstance(op, Offload) and op.value in last:
      continue  # Nobody will ask for it again.
    seen |= last
    if isinstance(op, Run | Repeat):
      donate = tuple(v for v in reads if v in last & fresh - outputs)
      donate = tuple(v for v in donate if donate.count(v) == 1)
      op = op._replace(donate=donate)
      last -= set(op.donate)
    backwards += [Drop(v) for v in sorted(last, reverse=True)]
    backwards.append(op)
  return [*[Drop(v) for v in sorted(starts - seen)], *reversed(backwards)]
