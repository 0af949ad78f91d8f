"""Formats a flow as a table with a row for each call of a stage."""

import collections

from planner import formatting

COLUMNS = ('stage', 'grain', 'reads from', 'makes', 'bytes')
LONGEST = 6  # Calls of a run whose repetitions are looked for.
SHOWN = 5  # Groups of outputs in full; smaller ones are counted.
WIDTH = {'reads from': 21, 'makes': 43}  # Longer cells continue below.


def _head(name: str) -> str:
  """Returns the first key of a value's path that is a name, or ''.

  A path is such as `minibatches.0.0.action` or `state.actor.step`.
  """
  keys = [key for key in name.split('.')[1:] if not key.isdigit()]
  return keys[0] if keys else ''


def _group(name, values) -> str:
  """Formats values of one name, as `logp 2× float32[64,128]`."""
  kinds = {f'{v.dtype}[{",".join(map(str, v.shape))}]' for v in values}
  if len(kinds) > 1:
    return f'{name} ({len(values)} arrays)'
  times = f'{len(values)}× ' if len(values) > 1 else ''
  return f'{name} {times}{kinds.pop()}'.strip()


def _makes(values) -> list[str]:
  """Lists the outputs of a call, the largest first."""
  groups = collections.defaultdict(list)
  for value in values:
    groups[_head(value.name)].append(value)
  largest = sorted(
    groups.items(), key=lambda group: -sum(v.bytes for v in group[1])
  )
  if len(largest) > SHOWN:
    rest = sum(len(values) for _, values in largest[SHOWN - 1 :])
    lines = [_group(*group) for group in largest[: SHOWN - 1]]
    return [*lines, f'and {rest} smaller']
  return [_group(*group) for group in largest]


def _wrap(items, width: int) -> list[str]:
  """Joins items into lines, which break between items."""
  lines = ['']
  for i, item in enumerate(items):
    item += ',' if i < len(items) - 1 else ''
    if lines[-1] and len(lines[-1]) + 1 + len(item) > width:
      lines.append('')
    lines[-1] = f'{lines[-1]} {item}'.strip()
  return lines


def _row(node, values, made_by) -> list[tuple[str, ...]]:
  """Returns the lines of one call."""
  writes = [values[v] for v in node.writes]
  reads = list(dict.fromkeys(made_by[v] for v in node.reads))
  cells = [
    [node.name],
    [f'≤ {node.stage.at_most} rounds' if node.body else node.stage.grain],
    _wrap(reads, WIDTH['reads from']),
    _wrap(_makes(writes), WIDTH['makes']),
    [formatting.byte_size(sum(value.bytes for value in writes))],
  ]
  height = max(map(len, cells))
  cells = [cell + [''] * (height - len(cell)) for cell in cells]
  return list(zip(*cells, strict=True))


def _rows(flow, made_by, indent='') -> list[tuple[str, ...]]:
  """Returns the lines of all calls; the body of a loop is indented.

  Calls that repeat with equal lines, such as those of each step of an episode,
  are shown once.
  """
  calls = []
  made_by |= {v: node.name for node in flow.nodes for v in node.writes}
  for node in flow.nodes:
    (name, *rest), *more = _row(node, flow.values, made_by)
    lines = [(indent + name, *rest), *more]
    if node.body:
      inner = {v: made_by[x] for v, x in node.ids_before.items()}
      inner |= dict.fromkeys((start for start, _ in node.body.carry), node.name)
      lines += _rows(node.body, inner, f'{indent}  ')
    calls.append(lines)
  return _once(calls, indent)


def _once(calls, indent: str) -> list[tuple[str, ...]]:
  """Joins the lines of calls, with repeated runs of calls shown once."""
  found, at = [], 0
  while at < len(calls):
    size, times = _repeated(calls, at)
    for lines in calls[at : at + size]:
      found += lines
    if times > 1:
      which = 'call' if size == 1 else f'{size} calls'
      note = f'{indent}(the last {which}: {times} times in all)'
      found.append((note, *[''] * (len(COLUMNS) - 1)))
    at += size * times
  return found


def _repeated(calls, at: int) -> tuple[int, int]:
  """Returns the size of the run of calls at `at`, and how often it repeats.

  Of several sizes, the one that covers the most calls.
  """
  best = 1, 1
  for size in range(1, LONGEST + 1):
    run, times = calls[at : at + size], 1
    while calls[at + times * size : at + (times + 1) * size] == run:
      times += 1
    if times > 2 and size * times > best[0] * best[1]:
      best = size, times
  return best


def flow_table(flow) -> str:
  """Tabulates stages, grains, sources of inputs, outputs and bytes."""
  made_by = dict.fromkeys(flow.inputs, 'input')
  for v, _ in flow.carry:
    made_by[v] = f'state.{_head(flow.values[v].name)}'.rstrip('.')
  lines = [COLUMNS]
  lines += _rows(flow, made_by)
  # A note on repetitions has no other cells, so that it may be longer.
  rows = [line for line in lines if any(line[1:])]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  table = [
    '  '.join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in lines
  ]
  carried = sum(flow.values[v].bytes for v, _ in flow.carry)
  head = (
    f'{len(flow.nodes)} stage calls; a state of {len(flow.carry)} arrays, '
    f'{formatting.byte_size(carried)}'
  )
  return '\n'.join([head, '', *table])
