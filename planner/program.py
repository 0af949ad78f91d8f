"""Lowers a flow and a plan to one straight-line program per place.

Whoever can interpret the instructions can run any workflow. Plans of one place
are lowered so far: three instructions. Places that hand values to each other
add theirs when they come.
"""

import collections
from typing import NamedTuple


class Run(NamedTuple):
  """Call stage node `node`, which may overwrite the values in `donate`."""

  node: int
  donate: tuple[int, ...] = ()


class Keep(NamedTuple):
  """When all else is done, let `end` become the next step's `start`."""

  end: int
  start: int


class Drop(NamedTuple):
  """Forget `value`."""

  value: int


Instruction = Run | Keep | Drop


def lower(flow, plan) -> dict[str, tuple[Instruction, ...]]:
  """Returns the program of every place.

  Values are dropped after their last use. What a stage reads for the last time
  it may overwrite, if the runtime alone can hold it: carried values and sums.

  Raises:
    ValueError: for stages without a place, or a plan of several places.
  """
  homeless = [name for name in flow.stages if name not in plan.stages]
  if homeless:
    raise ValueError(
      f'The plan has no place for {homeless}: it names {sorted(plan.stages)}.'
    )
  if len(plan.places) != 1:
    raise ValueError(
      f'The plan has {len(plan.places)} places; one is supported: put every '
      'stage on the same place, and give it as many devices as there are.'
    )
  _check_rows(flow, plan)
  program = [Run(i) for i in range(len(flow.nodes))]
  program += [Keep(end, start) for start, end in flow.carry if start != end]
  (place,) = plan.places
  return {place: tuple(_forget(program, flow))}


def _check_rows(flow, plan):
  for node in flow.nodes:
    rows = plan.rows.get(node.name)
    if rows is None:
      continue
    if node.stage.grain not in ('row', 'sum') or node.stage.host:
      raise ValueError(
        f'The plan takes {rows} rows of {node.name} at once, whose grain is '
        f"{node.stage.grain!r}: only JAX stages of grain 'row' and 'sum' can "
        'be run in micro-batches.'
      )
    for size in {flow.values[v].shape[0] for v in node.rows}:
      if rows < 1 or size % rows or rows % node.stage.group:
        raise ValueError(
          f'{node.name} has {size} rows, in groups of '
          f'{node.stage.group}, which cannot be taken {rows} at a time: choose '
          f'a divisor of {size} that is a multiple of {node.stage.group}.'
        )


def _forget(program, flow):
  """Adds drops and donations after the last use of every value."""
  starts = {start for start, _ in flow.carry}
  # What was lent, is given away or is kept twice is not the runtime's alone.
  shared = collections.Counter(end for _, end in flow.carry)
  shared.update({*flow.outputs, *flow.inputs})
  fresh = {start for start, end in flow.carry if shared[end] == 1}
  fresh |= {
    v for node in flow.nodes if node.stage.grain == 'sum' for v in node.writes
  }
  seen = {start for start, end in flow.carry if start == end}
  seen |= set(flow.outputs)
  backwards = []
  for op in reversed(program):
    if isinstance(op, Keep):
      reads, writes = (op.end,), ()
    else:
      node = flow.nodes[op.node]
      reads, writes = node.reads, node.writes
    last = {*reads, *writes} - seen
    seen |= last
    if isinstance(op, Run):
      donate = tuple(v for v in reads if v in last & fresh)
      op = Run(op.node, tuple(v for v in donate if donate.count(v) == 1))
      last -= set(op.donate)
    backwards += [Drop(v) for v in sorted(last, reverse=True)]
    backwards.append(op)
  backwards += [Drop(v) for v in sorted({*flow.inputs, *starts} - seen)]
  return reversed(backwards)
