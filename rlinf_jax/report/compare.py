"""Writes `compare.html`: runs or evaluations side by side on one page.

python -m rlinf_jax.report runs/a runs/b
"""

from collections.abc import Mapping, Sequence
import difflib
import html
import os
import pathlib
from typing import Any

import numpy as np

from rlinf_jax.report import summary
from rlinf_jax.report.html import charts, curves, evaluation_table, page
from rlinf_jax.run_files import run_folder

THIRD, WHOLE = 325, 1082  # Pixels inside of cards.
EXAMPLES = 6  # Completions shown of those that only one of two runs got right.
LONGEST = 600  # Characters shown of a completion.


def write(
  folders: Sequence[str | os.PathLike], output: str | os.PathLike
) -> pathlib.Path:
  """Writes the page that compares run folders; returns its path.

  Args:
    folders: two run folders or more, as many as there are colors.
    output: the page.

  Raises:
    FileNotFoundError: if a folder has no metrics.
    ValueError: if there are too many folders, or one of their files holds
      something else than runs write.
  """
  if len(folders) > charts.SERIES:
    raise ValueError(
      f'{len(folders)} runs cannot be told apart by {charts.SERIES} colors: '
      'compare fewer.'
    )
  runs = dict(zip(names(folders), map(run_folder.read, folders), strict=True))
  colors = {name: i for i, name in enumerate(runs, 1)}
  evaluations = _newest_evaluations(runs)
  text = page.render(
    'compare_template.html',
    name=html.escape(' and '.join(runs)),
    legend=page.legend(colors),
    summary=''.join(_sentence(name, run) for name, run in runs.items()),
    evaluations=_tables(evaluations) + _completions(evaluations),
    curves=_curves(runs, colors),
    metrics=_metrics(runs),
    bindings=_bindings(runs),
  )
  path = pathlib.Path(output)
  path.write_text(text, encoding='utf-8')
  return path


def names(folders: Sequence[str | os.PathLike]) -> list[str]:
  """Short different names of folders: the last parts of their paths."""
  parts = [pathlib.Path(folder).resolve().parts for folder in folders]
  for n in range(1, max(map(len, parts)) + 1):
    short = ['/'.join(x[-n:]) for x in parts]
    if len(set(short)) == len(short):
      return short
  raise ValueError(
    f'{folders[0]} is given twice: name two different run folders.'
  )


def _sentence(name: str, run: run_folder.Run) -> str:
  text = html.escape(summary.describe(run))
  return f'<p class="summary"><b>{html.escape(name)}</b>: {text}</p>'


def _newest_evaluations(
  runs: Mapping[str, run_folder.Run],
) -> dict[str, run_folder.Evaluation]:
  """The newest evaluation of each run that has one, by the name of the run.

  A training run's has the step in its name.
  """
  evaluations = {}
  for name, run in runs.items():
    if newest := run_folder.newest_evaluation(run):
      evaluations[f'{name}{newest.after}'] = newest
  return evaluations


def _tables(evaluations: Mapping[str, run_folder.Evaluation]) -> str:
  """Scores and their intervals, one table below the other."""
  cards = ''.join(
    evaluation_table.card(html.escape(name), evaluation.content['sets'])
    for name, evaluation in evaluations.items()
  )
  return cards and f'<h2>Evaluations</h2><div class="grid">{cards}</div>'


def _completions(evaluations: Mapping[str, run_folder.Evaluation]) -> str:
  """Problems that only one of two evaluations solved, with both answers."""
  if len(evaluations) != 2:
    return ''
  first, second = (_by_problem(x.folder) for x in evaluations.values())
  both = [x for x in first if x in second]
  if not both:
    return ''
  gained = [x for x in both if _right(second[x]) > _right(first[x])]
  lost = [x for x in both if _right(second[x]) < _right(first[x])]
  a, b = map(html.escape, evaluations)
  parts = []
  for title, problems in ((f'{b} is better', gained), (f'{a} is better', lost)):
    better, worse = (second, first) if problems is gained else (first, second)
    rows = ''
    for x in problems[:EXAMPLES]:
      # One has a right sample, and the other a wrong one.
      shown = {
        id(better): max(better[x], key=lambda record: record['correct']),
        id(worse): min(worse[x], key=lambda record: record['correct']),
      }
      pair = ''.join(_sample(shown[id(run)]) for run in (first, second))
      rows += f'<div class="pair">{pair}</div>'
    parts.append(f'<h3>{title} <small>{len(problems)} problems</small></h3>')
    parts.append(rows)
  alike = len(both) - len(gained) - len(lost)
  return (
    f'<h2>Completions <small>of {len(both)} problems; on {alike} of them both '
    f'are as good</small></h2>{"".join(parts)}'
  )


def _by_problem(folder: pathlib.Path) -> dict[tuple, list[Mapping[str, Any]]]:
  """The completions of each problem, by its set and its prompt.

  Those whose environment failed are neither right nor wrong.
  """
  problems = {}
  for record in run_folder.completions(folder):
    key = record['set'], record['problem'], record['prompt']
    if not record.get('env_failed'):
      problems.setdefault(key, []).append(record)
  return problems


def _right(records: Sequence[Mapping[str, Any]]) -> float:
  return float(np.mean([record['correct'] for record in records]))


def _sample(record: Mapping[str, Any]) -> str:
  kind, mark = ('right', '✓') if record['correct'] else ('wrong', '✗')
  # Records of some sources have no answer.
  texts = record['prompt'], record['completion'], str(record.get('answer', ''))
  prompt, completion, answer = (
    html.escape(x if len(x) <= LONGEST else x[:LONGEST] + ' …') for x in texts
  )
  return (
    f'<div class="sample {kind}"><span class="reward">{mark}</span>'
    f'<pre><i>{prompt}</i>{completion}</pre>'
    f'{answer and f"<small>The answer is {answer}</small>"}</div>'
  )


def _curves(
  runs: Mapping[str, run_folder.Run], colors: Mapping[str, int]
) -> str:
  """A chart for each metric that more than one run has over steps."""
  cards = []
  headlines = tuple(
    (x.label[0].upper() + x.label[1:], '', {'': x.metric})
    for x in summary.HEADLINES
    if x.metric.startswith('eval/')
  )
  for title, note, metrics in (*headlines, *curves.CURVES):
    for label, metric in metrics.items():
      series = {
        name: run.series[metric]
        for name, run in runs.items()
        if metric in run.series
        and len(run.series[metric].step) > 1
        and np.isfinite(run.series[metric].value).any()
      }
      if len(series) < 2:
        continue
      lines = [charts.Curve(*s, colors[name]) for name, s in series.items()]
      picture = charts.curves(lines, width=THIRD, height=150)
      small = ', '.join(x for x in (note, label) if x)
      cards.append(page.card(title, small, picture, '', 'third'))
  if not cards:
    return ''
  return f'<h2>Metrics over steps</h2><div class="grid">{"".join(cards)}</div>'


def _metrics(runs: Mapping[str, run_folder.Run]) -> str:
  """The last value of metrics that several runs have, and of evaluations.

  Of the sets on which one run alone was evaluated, its value stands alone.
  """
  metrics = sorted({name for run in runs.values() for name in run.series})
  rows = []
  for metric in metrics:
    having = [run for run in runs.values() if metric in run.series]
    if len(having) < 2 and not metric.startswith('eval/'):
      continue
    cells = ''.join(
      f'<td>{summary.number(float(run.series[metric].value[-1]))}</td>'
      if metric in run.series
      else '<td>–</td>'
      for run in runs.values()
    )
    rows.append(f'<tr><td>{html.escape(metric)}</td>{cells}</tr>')
  head = ''.join(f'<th>{html.escape(name)}</th>' for name in runs)
  return f'<table><tr><th>metric</th>{head}</tr>{"".join(rows)}</table>'


def _bindings(runs: Mapping[str, run_folder.Run]) -> str:
  """The lines of config.gin in which runs differ from the first."""
  (first, start), *others = runs.items()
  blocks = []
  for name, run in others:
    lines = difflib.unified_diff(
      _config(start), _config(run), first, name, lineterm='', n=0
    )
    text = '\n'.join(x for x in lines if not x.startswith('@@'))
    blocks.append(f'<pre>{html.escape(text or "The same bindings.")}</pre>')
  return ''.join(blocks)


def _config(run: run_folder.Run) -> list[str]:
  """The bindings of a run, without comments and its own folder."""
  path = run.folder / 'config.gin'
  text = ''
  if path.exists():
    text = path.read_text(encoding='utf-8', errors='replace')
  return [
    line
    for line in text.splitlines()
    if line.strip() and not line.startswith(('#', 'WORKDIR ='))
  ]
