"""The part of a plan's page on what a compiler says of it."""

from collections.abc import Mapping
import html
from typing import Any

from planner import formatting
from planner.explain import report_text
from rlinf_jax.report.html import page

# Bytes of a stage, in the order of their columns.
SIZES = (
  'arguments',
  'temporary',
  'needed',
  'others',
  'total',
  'usable',
  'modeled',
)
# Columns of the other costs of a stage.
COSTS = 'matrix FLOPs', 'modeled', 'sent', 'modeled'


def section(data: Mapping[str, Any]) -> str:
  """A table of compiled stages, from the field 'compiled' of a plan's data."""
  items = ''.join(f'<li>{html.escape(line)}</li>' for line in data['notes'])
  return (
    f'<h2>Compiled for {html.escape(data["topology"])}</h2><div class="grid">'
    + page.card(
      'Stages as compiled',
      'of one device and one call; others are bytes of values that lie on the '
      'device meanwhile',
      f'{_table(data["stages"])}<ul class="list">{items}</ul>',
      '',
      'whole',
    )
    + ''.join(map(_runner_up, data['runners_up']))
    + '</div>'
  )


def _runner_up(data: Mapping[str, Any]) -> str:
  summary = html.escape(report_text.slower(data))
  if data['refusal']:
    refusal = f'<p>{html.escape(data["refusal"])}</p>'
    return page.card('A slower plan, refused', summary, refusal, '', 'whole')
  table = _table(data['stages'])
  return page.card('A slower plan, as compiled', summary, table, '', 'whole')


def _table(stages) -> str:
  columns = 'stage', *SIZES, *COSTS, ''
  head = ''.join(f'<th>{name}</th>' for name in columns)
  rows = ''.join(map(_row, stages))
  return f'<table><tr>{head}</tr>{rows}</table>'


def _row(stage) -> str:
  memory = stage['memory']
  cells = [formatting.byte_size(memory[name]) for name in SIZES]
  for name, form in (
    ('matmul_flops', '{:.3g}'.format),
    ('collective_bytes', formatting.byte_size),
  ):
    for number in (stage[name], stage[f'modeled_{name}']):
      cells.append('' if number is None else form(number))
  return (
    f'<tr><td>{html.escape(stage["name"])} '
    f'<small>{html.escape(stage["place"])}</small></td>'
    + ''.join(f'<td class="nowrap">{cell}</td>' for cell in cells)
    + '<td><span class="tag compiled">compiled</span></td></tr>'
  )
