"""Describes a plan: its places, its timeline, its bottleneck and transfers."""

import collections
from collections.abc import Iterator, Sequence
import json
import string
from typing import Any

from planner import formatting
from planner.ir import graph, instruction
from planner.lower import program as program_lib
from planner.lower import rounding
from planner.simulation import clock

IDLE, MOVING = '·', '~'
PLUMBING = {'run': 'moves rows'}  # Nodes that the planner adds.


def _steady(simulation) -> list[clock.Span]:
  """Returns the spans of the last step, when the pipeline is full."""
  last = max((span.step for span in simulation.spans), default=0)
  return [span for span in simulation.spans if span.step == last]


def of_a_period(simulation) -> list[clock.Span]:
  """Returns the spans from the end of one step to the next, from second zero.

  With stale parameters, several steps overlap in this interval. It begins
  where the pipeline is full, and cuts the spans that reach beyond it.
  """
  half = (max((span.step for span in simulation.spans), default=0) + 1) // 2
  ends = (s.end for s in simulation.spans if s.step == half - 1)
  start = max(ends, default=0.0)
  return [
    span._replace(
      step=span.step - half,
      start=max(0.0, span.start - start),
      end=min(span.end - start, simulation.period),
    )
    for span in simulation.spans
    if start < span.end and span.start < start + simulation.period
  ]


def flows(flow: graph.Flow) -> Iterator[graph.Flow]:
  """Yields a flow and the bodies of its loops."""
  yield flow
  for node in flow.nodes:
    if node.body:
      yield from flows(node.body)


def node_of(flow: graph.Flow, span: clock.Span) -> graph.Node | None:
  """Returns the call of a stage in a span; None for moves and waits."""
  if span.node is None:
    return None
  for i in span.loop:
    flow = flow.nodes[i].body
  node = flow.nodes[span.node]
  return None if graph.is_plumbing(node) else node


def stage_of(flow: graph.Flow, span: clock.Span) -> str | None:
  """Returns the stage of a span; None for moves and waits."""
  node = node_of(flow, span)
  return node and node.name


def letters(flow: graph.Flow) -> dict[str, str]:
  """Assigns a letter to each stage, from its own name if one is free."""
  taken = {}
  for name in flow.stages:
    free = [c for c in name + string.ascii_letters if c not in taken.values()]
    taken[name] = free[0] if free else '#'
  return taken


def chart(flow: graph.Flow, simulation, width: int = 60) -> str:
  """Draws a period as text: a line for each place, a letter for each stage."""
  if not simulation.spans:
    return 'Nothing takes any time.'
  scale = width / simulation.period if simulation.period else 0.0
  sign = letters(flow)
  lines = {span.place: [IDLE] * width for span in simulation.spans}
  for span in of_a_period(simulation):
    if span.what == 'wait':
      continue
    line = lines[span.place]
    stage = stage_of(flow, span)
    mark = sign[stage] if stage else MOVING
    first, until = int(span.start * scale), int(span.end * scale)
    for i in range(first, max(until, min(first + 1, width))):
      if until > first or line[i] == IDLE:
        line[i] = mark
  shown = set().union(*lines.values())
  legend = [f'{c} {name}' for name, c in sign.items() if c in shown]
  legend += [f'{MOVING} moves'] * (MOVING in shown)
  legend += [f'{IDLE} waits'] * (IDLE in shown)
  pad = max(map(len, lines))
  rows = [f'{place:{pad}}  {"".join(line)}' for place, line in lines.items()]
  scale = f'{"":{pad}}  0{simulation.period:>{width - 1}.3g} s'
  return '\n'.join([*rows, scale, *_wrap(legend, pad + 2, width)])


def _wrap(words: Sequence[str], indent: int, width: int) -> list[str]:
  lines = ['']
  for word in words:
    if lines[-1] and len(lines[-1]) + 2 + len(word) > width:
      lines.append('')
    lines[-1] += f'{"  " * bool(lines[-1])}{word}'
  return [' ' * indent + line for line in lines]


def busy(flow: graph.Flow, simulation) -> dict[str, dict[str, float]]:
  """Returns the seconds of a step that each place spends on each stage."""
  total = collections.defaultdict(lambda: collections.defaultdict(float))
  for span in _steady(simulation):
    if span.what != 'wait':
      name = stage_of(flow, span) or PLUMBING.get(span.what, span.what)
      total[span.place][name] += span.end - span.start
  return {place: dict(stages) for place, stages in total.items()}


def bottleneck(flow: graph.Flow, simulation, seconds: float) -> str:
  """Names the busiest place, and how much of a step the others wait.

  Args:
    flow: of the plan.
    simulation: of its steps.
    seconds: of a step: no less than the busiest place's, which a few simulated
      steps may not show yet.
  """
  shares = {
    place: sum(stages.values()) / seconds
    for place, stages in busy(flow, simulation).items()
    if seconds
  }
  if not shares:
    return 'Nothing takes any time.'
  place = max(shares, key=shares.get)
  stages = busy(flow, simulation)[place]
  longest = max(stages, key=stages.get)
  line = (
    f'Place {place} is busy {100 * shares[place]:.0f} % of the time, mostly '
    f'with {longest} ({formatting.digits(stages[longest])} s of '
    f'{formatting.digits(seconds)} s).'
  )
  idle = [
    f'{name} waits {100 * (1 - share):.0f} %'
    for name, share in shares.items()
    if name != place
  ]
  return ' '.join([line, *([f'{", ".join(idle)}.'] if idle else [])])


def places(flow: graph.Flow, plan) -> str:
  """Describes a plan: devices, mesh and stages of every place."""
  lines = []
  for name, place in plan.places.items():
    stages = [s for s in flow.stages if plan.stages[s] == name]
    rows = [
      f'{s} {plan.micro_batch[s]} rows at a time'
      for s in stages
      if s in plan.micro_batch
    ]
    rows += [f'{s} remat {plan.remat[s]}' for s in stages if s in plan.remat]
    lines += [f'{name}: {place}', f'  {" → ".join(stages)}']
    lines += [f'  {", ".join(rows)}'] * bool(rows)
  lines += [f'in {plan.pieces} pieces'] * (plan.pieces > 1)
  if plan.offload:
    lines.append(f'in host memory: {", ".join(plan.offload)}')
  if plan.shared_devices:
    lines.append(
      'take turns on shared devices, in this order: '
      f'{", ".join(plan.shared_devices)}'
    )
  return '\n'.join(lines)


def one_line(flow: graph.Flow, plan) -> str:
  """Describes a plan in one line."""
  parts = []
  for name, place in plan.places.items():
    stages = [s for s in flow.stages if plan.stages[s] == name]
    mesh = ' '.join(f'{axis}={size}' for axis, size in place.axes)
    count = len(place.devices)
    devices = f'{count} device{"s" * (count > 1)}'
    axes = f' ({mesh})' if mesh else ''
    parts.append(f'[{" ".join(stages)}] on {devices}{axes}')
  parts += [f'{plan.pieces} pieces'] * (plan.pieces > 1)
  parts += [f'{s} {n} rows at a time' for s, n in plan.micro_batch.items()]
  parts += [f'{s} remat {policy}' for s, policy in plan.remat.items()]
  parts += [f'offloaded {" ".join(plan.offload)}'] * bool(plan.offload)
  parts += [f'devices shared by {" ".join(plan.shared_devices)}'] * bool(
    plan.shared_devices
  )
  return ', '.join(parts)


def to_json(evaluation) -> dict[str, Any]:
  """Returns a plan, its period, busy seconds and moves, for JSON.

  Args:
    evaluation: of the plan, an `evaluate_plan.PlanEvaluation`.
  """
  flow, simulation = evaluation.flow, evaluation.simulation
  return {
    'plan': json.loads(evaluation.plan.to_json()),
    'period': simulation.period,
    'busy': busy(flow, simulation),
    'moves': moves(evaluation),
  }


def moves(evaluation) -> dict[str, int]:
  """Returns bytes that a step sends from stage to stage, largest first.

  A place is sent a value once, for the first of its stages that reads it, and
  in the type in which it holds it. What loops send is left out.

  Args:
    evaluation: of a plan, an `evaluate_plan.PlanEvaluation`.
  """
  flow, plan = evaluation.flow, evaluation.plan
  held, total = rounding.held(flow, plan), collections.Counter()
  parts = program_lib.parts(flow, plan)
  for program in evaluation.programs.values():
    for op in program:
      if isinstance(op, instruction.Send) and op.place != instruction.SINK:
        value = flow.values[held[op.place].get(op.value, op.value)]
        reader = _reader(flow, parts, op.value, op.place) or op.place
        total[f'{_maker(flow, op.value)} → {reader}'] += value.bytes
  return dict(total.most_common())


def _maker(flow: graph.Flow, value: int) -> str:
  """Returns the stage that makes a value, or what has it at first."""
  while value in flow.maker:
    node = flow.nodes[flow.maker[value]]
    if not graph.is_plumbing(node):
      return node.name
    value = node.reads[0]
  return flow.values[value].name.split('.')[0]


def _reader(flow: graph.Flow, parts, value: int, place: str) -> str | None:
  """Returns the first stage of a place that reads a value; None for none.

  That may be in the next step, where it is the start of a carried value.
  """
  pending = [value]
  for v in pending:
    made = []
    for i in flow.readers.get(v, ()):
      node = flow.nodes[i]
      if place not in parts[i]:
        continue
      if not graph.is_plumbing(node):
        return node.name
      made += node.writes
    made += [start for start, end in flow.carry if end == v]
    pending += [w for w in made if w not in pending]
  return None


def transfers(evaluation) -> str:
  """Formats these bytes in a line."""
  found = moves(evaluation)
  return ', '.join(
    f'{way} {formatting.byte_size(n)}' for way, n in found.items()
  )
