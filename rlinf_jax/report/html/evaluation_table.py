"""Tables of an evaluation's results: as text and as HTML."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from rlinf_jax.report.html import page

# Scores, in the order of their columns, and other numbers.
SCORES = (
  'accuracy',
  'success_once',
  'success_at_end',
  'pass_at_',
  'maj_at_',
  'agreement',
)
OTHERS = {
  'reward': ('reward', '{:.3f}'),
  'return': ('return', '{:.2f}'),
  'response_length_mean': ('tokens', '{:,.0f}'),
  'episode_length': ('steps', '{:,.0f}'),
  'truncated_fraction': ('cut off', '{:.1%}'),
  'env_failed': ('failed', '{:,.0f}'),
  'failed': ('failed', '{:,.0f}'),
  'loss': ('loss', '{:.4f}'),
  'token_probability': ('token probability', '{:.1%}'),
  'reward_margin': ('reward margin', '{:.3f}'),
}

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def rows(results: Results) -> list[list[str]]:
  """The cells of a table: a row of titles, then one for each set.

  A score is followed by its confidence interval of 95 %, in percent.

  Args:
    results: as `rlinf_jax.run.evaluation.results`.
  """
  metrics = {name: None for values in results.values() for name in values}
  # As numbers: pass@2 before pass@16.
  names = sorted(metrics, key=lambda x: (len(x), x))
  scores = [x for kind in SCORES for x in names if x.startswith(kind)]
  others = [x for x in OTHERS if x in metrics]
  titles = [x.replace('_at_', '@').replace('_', ' ') for x in scores]
  table = [['set', 'problems', *titles, *(OTHERS[x][0] for x in others)]]
  for name, values in results.items():
    problems = max((x.get('problems', 0) for x in values.values()), default=0)
    cells = [name, f'{problems:,}' if problems else '']
    cells += [_score(values.get(x)) for x in scores]
    cells += [
      OTHERS[x][1].format(values[x]['value']) if x in values else ''
      for x in others
    ]
    table.append(cells)
  return table


def _score(score: Mapping[str, Any] | None) -> str:
  """A score and its confidence interval: '41.2% (38.6–43.9)'."""
  if score is None:
    return ''
  text = f'{score["value"]:.1%}'
  if 'interval' in score:
    low, high = score['interval']
    text += f' ({100 * low:.1f}–{100 * high:.1f})'
  return text


def text(results: Results) -> str:
  """The table as lines of text."""
  table = rows(results)
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = [
    '  '.join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    for row in table
  ]
  note = 'In parentheses: confidence intervals of 95 %, over problems.'
  return '\n'.join([*lines, note])


def as_html(table: Sequence[Sequence[str]]) -> str:
  """The table as HTML."""
  head, *body = table

  def row(cells, tag):
    cells = ''.join(f'<{tag}>{html.escape(x)}</{tag}>' for x in cells)
    return f'<tr>{cells}</tr>'

  rows = ''.join(row(cells, 'td') for cells in body)
  return f'<table>{row(head, "th")}{rows}</table>'


def card(title: str, results: Results) -> str:
  """The table as a card of a page.

  Args:
    title: of the card, as HTML.
    results: as in `rows`.
  """
  note = 'in parentheses: confidence intervals of 95 %, over problems'
  return page.card(title, note, as_html(rows(results)), '', 'whole')
