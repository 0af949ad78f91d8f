"""Reports what a compiler says of a plan: as data, and as lines of text."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

from planner import formatting
from planner.explain import report_text
from rlinf_jax.planning.compiled import plan_compiler
from rlinf_jax.planning.compiled import topology as topology_lib
from rlinf_jax.report.html import compiled_table

COLUMNS = 'place', 'stage', *compiled_table.SIZES, *compiled_table.COSTS
LEFT = 2  # Columns of words.
SMALL = 0.01  # Of a stage's bytes sent, or seconds: such parts are not listed.
LITTLE = 0.1  # Of the largest stage's bytes: notes on such stages are left out.
LONGEST_NAME = 80  # Characters of an operation's name.


def to_data(
  compiled: plan_compiler.CompiledPlan,
  topology: topology_lib.Topology,
  refused: Sequence[tuple[Any, str]] = (),
  runners_up: Sequence[tuple[str, float, plan_compiler.CompiledPlan]] = (),
) -> dict[str, Any]:
  """Returns what the compiler says of a plan, as data for JSON.

  Args:
    compiled: the plan.
    topology: the devices.
    refused: faster plans that the compiler refused, and why.
    runners_up: slower plans that were compiled, too, each after its summary
      and by which part its steps take longer than those of `compiled`.
  """
  stages = [_stage(stage) for stage in compiled.stages]
  largest = max((stage['memory']['needed'] for stage in stages), default=0)
  return {
    'topology': str(topology),
    'tag': 'compiled',
    'stages': stages,
    'notes': [
      line
      for stage in stages
      if stage['memory']['needed'] > LITTLE * largest
      for line in _notes(stage)
    ],
    'refused': [words for _, words in refused],
    'runners_up': [
      {
        'summary': summary,
        'relative_slowdown': slowdown,
        'refusal': found.refusal,
        'stages': [_stage(stage) for stage in found.stages],
      }
      for summary, slowdown, found in runners_up
    ],
  }


def _stage(stage: plan_compiler.CompiledStage) -> dict[str, Any]:
  executable = stage.executable
  return {
    'name': stage.name,
    'place': stage.place,
    'rows': stage.rows,
    'calls': stage.calls,
    'seconds': stage.seconds,
    'memory': {
      **executable.memory._asdict(),
      'needed': executable.memory.needed,
      'others': stage.modeled.others,
      'total': stage.total,
      'usable': stage.usable,
      'modeled': stage.modeled.memory,
    },
    'matmul_flops': executable.matmul_flops,
    'modeled_matmul_flops': stage.modeled.matmul_flops,
    'least_seconds': sum(x.seconds for x in stage.least) or None,
    'least': [x._asdict() for x in stage.least],
    'collective_bytes': sum(x.bytes for x in executable.collectives),
    'modeled_collective_bytes': stage.modeled.collective_bytes,
    'collectives': [x._asdict() for x in executable.collectives],
    'large_arrays': [_array(x) for x in executable.large_arrays],
    'scores': executable.scores and _array(executable.scores),
    'unknown_loops': executable.unknown_loops,
    'rematerialized': stage.rematerialized,
  }


def _array(large) -> dict[str, Any]:
  return {
    'type': str(large.array),
    'bytes': large.array.bytes,
    'times': large.times,
    'op_name': large.op_name,
  }


def text(data: Mapping[str, Any] | None) -> list[str]:
  """Formats the data of `to_data` as lines; none if nothing was compiled."""
  if not data:
    return []
  head = (
    f'Compiled for {data["topology"]}; of each device and call, tagged '
    f'{data["tag"]} beside the modeled numbers:'
  )
  refused = [
    f'The compiler refused a faster plan: {words}' for words in data['refused']
  ]
  lines = [*refused, head, *_table(data['stages']), *data['notes'], '']
  for other in data['runners_up']:
    if other['refusal']:
      lines += [f'A slower plan was refused: {other["refusal"]}', '']
    else:
      lines += [f'A slower plan, compiled: {report_text.slower(other)}']
      lines += [*_table(other['stages']), '']
  return lines


def _table(stages: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a line of titles, and one for each stage."""
  table = [COLUMNS, *map(row, stages)]
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return [
    '  '.join(
      word.ljust(n) if i < LEFT else word.rjust(n)
      for i, (word, n) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
    for cells in table
  ]


def row(stage: Mapping[str, Any]) -> list[str]:
  """Returns the cells of a stage's row."""
  memory = stage['memory']
  return [
    stage['place'],
    stage['name'],
    *(formatting.byte_size(memory[name]) for name in compiled_table.SIZES),
    _number(stage['matmul_flops']),
    _number(stage['modeled_matmul_flops']),
    formatting.byte_size(stage['collective_bytes']),
    '-'
    if stage['modeled_collective_bytes'] is None
    else formatting.byte_size(stage['modeled_collective_bytes']),
  ]


def _number(n: float | None) -> str:
  return '-' if n is None else f'{n:.3g}'


def _notes(stage: Mapping[str, Any]) -> list[str]:
  """Returns sentences on collectives, large arrays, scores and layouts."""
  name, scores = stage['name'], stage['scores']
  lines = [*_collectives(stage), *_arrays(stage)]
  if stage['least_seconds']:
    lines.append(_least(stage))
  if scores:
    lines.append(
      f'{name} materializes attention scores of length × length: '
      f'{scores["type"]}, {formatting.byte_size(scores["bytes"])}, '
      f'{scores["times"]} times.'
    )
  if stage['unknown_loops']:
    lines.append(
      f'{name} has {stage["unknown_loops"]} loops of unknown trip count, which '
      'count once.'
    )
  lines += [
    f'{name}: the partitioner replicates {words} to change its layout.'
    for words in stage['rematerialized']
  ]
  return lines


def _collectives(stage) -> list[str]:
  least = SMALL * stage['collective_bytes']
  parts = [
    f'{x["kind"]} ({x["axis"]}) {x["count"]} × '
    f'{formatting.byte_size(x["bytes"] / x["count"])}'
    for x in stage['collectives']
    if x['bytes'] > least
  ]
  return [f'{stage["name"]} sends: {", ".join(parts)}.'] if parts else []


def _least(stage) -> str:
  """Returns a sentence on the seconds of a call, and of its operations."""
  total = stage['least_seconds']
  parts = [
    f'{x["kind"]}, {_times(x["times"])}: {formatting.seconds(x["seconds"])}'
    + f' ({formatting.seconds(x["at_peak"])} at the peak)' * bool(x['at_peak'])
    for x in stage['least']
    if x['seconds'] > SMALL * total
  ]
  return (
    f'{stage["name"]} takes {formatting.seconds(total)} at least, by the '
    f"compiler's estimates without communication ({'; '.join(parts)})."
  )


def _times(n: int) -> str:
  return 'once' if n == 1 else f'{n:,} times'


def _arrays(stage) -> list[str]:
  parts = [
    f'{x["type"]} {formatting.byte_size(x["bytes"])}'
    + f' ({_shortened(x["op_name"])})' * bool(x['op_name'])
    for x in stage['large_arrays'][:2]
  ]
  return [f'{stage["name"]} writes: {", ".join(parts)}.'] if parts else []


def _shortened(op_name: str) -> str:
  """Leaves out the functions that JAX compiled, and the start of long names."""
  name = re.sub(r'^(?:jit\([^)]*\)/)*', '', op_name)
  return name if len(name) <= LONGEST_NAME else f'…{name[-LONGEST_NAME:]}'
